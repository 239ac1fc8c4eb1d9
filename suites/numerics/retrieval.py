"""Judges answers to retrieval questions: token by token, with margins, and by what was selected.

Knows what was asked and what came back: token ids, log-probabilities, sets of cache entries. It
does not know the model or the engine, and cannot say why an entry was not selected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fixtures.prompts.retrieval import Haystack, Request
from suites.findings import Finding, Judgement, NotChecked
from suites.numerics.logprobs import Listing

NEEDLES_MIN = 16

NAMES: Mapping[str, str] = {
    "needle-wrong": "a token of the value is not the planted one",
    "needle-missing": "the answer ends early, or says that nothing was found",
    "needle-bled": "the answer is the value of another request",
    "needle-confused": "the answer is the value of another needle in the same haystack",
    "absent-answered": "a key that was never planted got an answer",
    "margin-low": "a right token is hardly ahead of the best other one",
    "logprob-missing": "a token came without the log-probabilities that judge it",
    "lost-by-selection": "the entry that holds the next token was not selected",
    "lost-by-model": "the entry was selected and the answer is wrong all the same",
    "evidence-contradicts": "the answer is right although its entry was not selected",
    "too-few-needles": "fewer needles were asked than a start must answer",
    "answer-unasked": "there is an answer to a question that was not asked, or none to one",
}


@dataclass(frozen=True)
class Asked:
    """One question: `expected` ids of the answer, or of `unknown` throughout for a control.

    control  "needle", "absent" or "near"
    needed   per step, index source -> entry that has to be selected; may be empty
    """

    name: str
    expected: tuple[int, ...]
    control: str = "needle"
    needed: tuple[Mapping[int, int], ...] = ()

    @property
    def is_needle(self) -> bool:
        return self.control == "needle"


@dataclass(frozen=True)
class Token:
    """A generated token with its log-probability and that of the best other token."""

    token: int
    logprob: float | None
    runner_up: float | None

    @property
    def margin(self) -> float | None:
        """How far ahead of every other token it is, in nats; negative if it was not the best."""
        if self.logprob is None or self.runner_up is None:
            return None
        return self.logprob - self.runner_up


@dataclass(frozen=True)
class Answer:
    """What came back for the question `name`.

    selected  per step, index source -> entries its query chose; empty where unknown
    """

    name: str
    tokens: tuple[Token, ...]
    selected: tuple[Mapping[int, frozenset[int]], ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.token for token in self.tokens)


@dataclass(frozen=True)
class Verdict:
    """One answer judged: `name` is "right" or one of NAMES, `step` the first wrong one (from 0)."""

    name: str
    asked: Asked
    answer: Answer
    step: int | None = None
    source: str | None = None

    @property
    def is_right(self) -> bool:
        return self.name == "right"

    @property
    def margin_min(self) -> float | None:
        """Smallest margin over the value's tokens; None where one is unknown."""
        margins = [token.margin for token in self.answer.tokens[: len(self.asked.expected)]]
        return None if None in margins or not margins else min(margins)


@dataclass(frozen=True)
class Rules:
    """unknown     the id that says nothing was found
    margin_min  nats by which a right token must lead, or the answer is a finding of its own
    """

    unknown: int
    margin_min: float = 0.0
    others: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def asked_of(planted: Haystack) -> tuple[Asked, ...]:
    """The questions of a haystack, with the entries that each step's query has to select."""
    return tuple(
        Asked(
            question.name,
            question.expected,
            question.control,
            () if question.fact is None else planted.facts[question.fact].needed,
        )
        for question in planted.questions
    )


def asked_of_requests(requests: Sequence[Request]) -> tuple[Asked, ...]:
    """Whole prompts as questions: a length sweep, or requests that run together."""
    return tuple(Asked(request.name, request.expected) for request in requests)


def answer_of(listing: Listing, name: str, selected=()) -> Answer:
    """An answer from compared log-probabilities: every generated token with its list."""
    tokens = []
    for step in listing.steps:
        rest = [entry.value for entry in step.top if entry.token != step.token]
        assert isinstance(step.token, int), f"{step.token!r}: answers are judged by ids"
        tokens.append(Token(step.token, step.chosen, max(rest, default=None)))
    return Answer(name, tuple(tokens), tuple(selected))


# One answer ---------------------------------------------------------------------------------------


def first_wrong(expected: Sequence[int], ids: Sequence[int]) -> int | None:
    """The first step at which the answer is not the expected one, or ends before it."""
    for step, token in enumerate(expected):
        if step >= len(ids) or ids[step] != token:
            return step
    return None


def belongs_to(ids: Sequence[int], step: int, others: Mapping[str, Sequence[int]]) -> str | None:
    """Whose value the answer gives from `step` on, to its end."""
    for name, value in others.items():
        rest = tuple(value[step:])
        if rest and tuple(ids[step : step + len(rest)]) == rest:
            return name
    return None


def judge_answer(
    asked: Asked,
    answer: Answer,
    rules: Rules,
    siblings: Mapping[str, tuple[int, ...]] | None = None,
) -> Verdict:
    """The verdict on one answer.

    siblings     values of the other needles of the same haystack
    rules.others values of other requests that ran at the same time
    """
    step = first_wrong(asked.expected, answer.ids)
    if step is None:
        return Verdict("right", asked, answer)
    if owner := belongs_to(answer.ids, step, rules.others):
        return Verdict("needle-bled", asked, answer, step, owner)
    if not asked.is_needle:
        name = "needle-missing" if step >= len(answer.ids) else "absent-answered"
        return Verdict(name, asked, answer, step)
    if owner := belongs_to(answer.ids, step, siblings or {}):
        return Verdict("needle-confused", asked, answer, step, owner)
    if step >= len(answer.ids) or answer.ids[step] == rules.unknown:
        return Verdict("needle-missing", asked, answer, step)
    return Verdict("needle-wrong", asked, answer, step)


def answer_findings(verdict: Verdict, rules: Rules, where: str) -> Iterable[Finding]:
    """What is wrong with one answer, its margins included."""
    asked, answer = verdict.asked, verdict.answer
    place = f"{where} / {asked.name}"
    data = {"expected": list(asked.expected), "got": list(answer.ids)}
    if not verdict.is_right:
        got = list(answer.ids[: len(asked.expected)])
        words = f"expected {list(asked.expected)}, got {got}, first wrong at token {verdict.step}"
        if verdict.source:
            words += f"; this is the value of {verdict.source}"
            data["source"] = verdict.source
        yield Finding(verdict.name, place, words, data | {"step": verdict.step})
    right = len(asked.expected) if verdict.step is None else verdict.step
    for step, token in enumerate(answer.tokens[:right]):
        if token.margin is None:
            message = f"token {step} ({token.token}) has no log-probability to be judged by"
            yield Finding("logprob-missing", place, message, data | {"step": step})
        elif token.margin < rules.margin_min or token.margin <= 0:
            message = (
                f"token {step} ({token.token}) leads by {token.margin:.4g} nats; "
                f"{rules.margin_min:.4g} are needed"
            )
            yield Finding("margin-low", place, message, data | {"step": step})


def evidence_findings(verdict: Verdict, where: str) -> Iterable[Finding | NotChecked]:
    """Whether the selection held what the answer needed: it tells a miss of the indexer from one
    of the model. Steps after the first wrong one prove nothing and are left out."""
    asked, answer = verdict.asked, verdict.answer
    if not asked.needed:
        return
    place = f"{where} / {asked.name}"
    if not answer.selected:
        yield NotChecked(f"evidence of {place}", "the target shows no selected entries")
        return
    last = len(asked.expected) if verdict.step is None else verdict.step + 1
    for step, needed in enumerate(asked.needed[:last]):
        chosen = answer.selected[step] if step < len(answer.selected) else {}
        for source, entry in needed.items():
            if source not in chosen:
                reason = f"step {step} has no selection of layer {source}"
                yield NotChecked(f"evidence of {place}", reason)
                continue
            data = {"step": step, "layer": source, "entry": entry}
            data["selected"] = sorted(chosen[source])
            held, wrong = entry in chosen[source], step == verdict.step
            if wrong:
                name = "lost-by-model" if held else "lost-by-selection"
            elif not held:
                name = "evidence-contradicts"
            else:
                continue
            words = (
                f"token {step}: entry {entry} is {'' if held else 'not '}among the "
                f"{len(chosen[source])} that layer {source} selected"
            )
            yield Finding(name, place, words, data)


# A whole start ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One start's answers: every verdict, and all that follows from them."""

    verdicts: tuple[Verdict, ...]
    judgement: Judgement

    @property
    def needles(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.asked.is_needle)

    @property
    def score(self) -> str:
        """Right needles out of those asked, such as 16/16."""
        return f"{sum(v.is_right for v in self.needles)}/{len(self.needles)}"

    @property
    def margins(self) -> tuple[float, ...]:
        """Smallest margins of the right needles, ascending, in nats."""
        found = [v.margin_min for v in self.needles if v.is_right and v.margin_min is not None]
        return tuple(sorted(found))


def judge_start(
    where: str,
    asked: Sequence[Asked],
    answers: Sequence[Answer],
    rules: Rules,
    needles_min: int = NEEDLES_MIN,
) -> Result:
    """Every question of one start must be answered right: one needle lost is a red suite.

    Answers and questions pair by name; one without the other is a finding, as are fewer needles
    than `needles_min`.
    """
    given = {answer.name: answer for answer in answers}
    findings: list[Finding] = []
    not_checked: list[NotChecked] = []
    for name in sorted({question.name for question in asked} ^ given.keys()):
        what = "an answer nobody asked for" if name in given else "no answer"
        findings.append(Finding("answer-unasked", f"{where} / {name}", f"there is {what}"))
    values = {question.name: question.expected for question in asked if question.is_needle}
    verdicts = []
    for question in asked:
        if question.name not in given:
            continue
        siblings = {name: value for name, value in values.items() if name != question.name}
        verdict = judge_answer(question, given[question.name], rules, siblings)
        verdicts.append(verdict)
        findings += answer_findings(verdict, rules, where)
        for entry in evidence_findings(verdict, where):
            (findings if isinstance(entry, Finding) else not_checked).append(entry)
    needles = sum(question.is_needle for question in asked)
    if needles < needles_min:
        message = f"{needles} needles were asked; {needles_min} are needed"
        findings.append(Finding("too-few-needles", where, message, {"needles": needles}))
    return Result(tuple(verdicts), Judgement(tuple(findings), tuple(dict.fromkeys(not_checked))))


def judge_concurrent(
    where: str, asked: Sequence[Asked], answers: Sequence[Answer], rules: Rules
) -> Result:
    """Requests that ran together, each with a passphrase of its own: an answer that is another
    request's passphrase has bled. Needs as many needles as were asked, two at least."""
    parts = []
    for question in asked:
        others = {other.name: other.expected for other in asked if other.name != question.name}
        mine = Rules(rules.unknown, rules.margin_min, {**rules.others, **others})
        own = [answer for answer in answers if answer.name == question.name]
        parts.append(judge_start(where, [question], own, mine, needles_min=1))
    findings = [finding for part in parts for finding in part.judgement.findings]
    if len(asked) < 2:
        message = f"{len(asked)} request runs alone; bleeding takes two"
        findings.append(Finding("too-few-needles", where, message, {"needles": len(asked)}))
    known = {question.name for question in asked}
    for answer in answers:
        if answer.name not in known:
            words = "there is an answer nobody asked for"
            findings.append(Finding("answer-unasked", f"{where} / {answer.name}", words))
    open_points = [entry for part in parts for entry in part.judgement.not_checked]
    return Result(
        tuple(verdict for part in parts for verdict in part.verdicts),
        Judgement(tuple(findings), tuple(dict.fromkeys(open_points))),
    )
