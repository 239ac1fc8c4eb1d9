"""Compares what two runs say about the most likely tokens: ids, and the bits of fp32 logprobs.

Knows completions documents and nothing else: not who produced them, nor which differences a
configuration may cause. It cannot tell a tie at the cut from two tokens that swapped places
there, because a list of twenty does not show the twenty-first.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from suites.findings import Finding, Judgement

TOP = 20
DIGITS_MIN = 9  # that tell any two fp32 values apart

NAMES: Mapping[str, str] = {
    "logprob-missing": "a log-probability that was asked for is not there",
    "logprob-digits": "values are printed with too few digits to tell fp32 values apart",
    "logprob-collision": "two ids share one string, so a value is lost",
    "logprob-impossible": "a log-probability is above zero or not a number",
    "logprob-order": "a list is not ordered by value",
    "token-differs": "the two runs chose different tokens",
    "top-differs": "a token is in one list above the cut and not in the other",
    "logprob-differs": "the same token has another value",
    "vocabulary-differs": "the hashes over the whole vocabulary differ",
    "tie-at-cut": "tokens of equal value fall on both sides of the cut",
    "nothing-compared": "there was not one value to compare",
    "outside-bound": "two runs differ by more than the stated bound",
}


class Printed(float):
    """A number of a JSON document that remembers how it was written."""

    text: str

    def __new__(cls, text: str) -> Printed:
        value = super().__new__(cls, text)
        value.text = text
        return value


@dataclass(frozen=True)
class Entry:
    """One token of a list; `token` is an id, or the text where the document has no ids."""

    token: int | str
    value: float
    text: str


@dataclass(frozen=True)
class Step:
    """Generated token `number` (from 1): what was chosen, and the list of the best."""

    number: int
    token: int | str
    chosen: float | None
    top: tuple[Entry, ...]
    vocabulary_hash: str | None = None


@dataclass(frozen=True)
class Listing:
    """What one run says about one prompt; `findings` tell what reading it already showed."""

    run: str
    prompt: str
    steps: tuple[Step, ...]
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Bound:
    """How far two runs that are not bit-stable may differ; a target states it with its
    capabilities. KL is in nats, over the common tokens and one remainder."""

    share_identical_min: float
    ulp_max: int
    kl_max: float


@dataclass(frozen=True)
class Spread:
    """How two runs differ over many values."""

    values: int
    identical: int
    ulp_max: int
    kl_max: float

    @property
    def share_identical(self) -> float:
        return self.identical / self.values if self.values else 0.0


# Values -------------------------------------------------------------------------------------------


def bits(value: float) -> int:
    """Place of an fp32 value among all of them: neighbours differ by one, -0.0 equals 0.0."""
    pattern = int(np.float32(value).view(np.int32))
    return pattern if pattern >= 0 else -(pattern & 0x7FFFFFFF)


def ulp_distance(a: float, b: float) -> int:
    """How many fp32 values apart two values are."""
    return abs(bits(a) - bits(b))


def significant_digits(text: str) -> int:
    """Digits of a printed number, without leading zeros."""
    digits = text.lower().lstrip("+-").split("e")[0].replace(".", "").lstrip("0")
    return len(digits)


def loses_bits(text: str) -> bool:
    """Whether a printed number is a shortened one.

    Fine are the exact value of an fp32 (as Python prints a float), nine digits or more, nine
    digits with zeros left off at the end, and the shortest form that reads back to the same fp32.
    """
    value = float(text)
    single = np.float32(value)
    if not math.isfinite(value) or significant_digits(text) >= DIGITS_MIN:
        return False
    full = f"{float(single):.{DIGITS_MIN}g}", np.format_float_positional(single, unique=True)
    return value not in (float(single), *map(float, full))


def vocabulary_hash(logprobs: np.ndarray) -> str:
    """SHA-256 over fp32 values of a whole vocabulary; -0.0 counts as 0.0."""
    values = np.ascontiguousarray(logprobs, np.float32) + np.float32(0.0)
    return hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()


# Reading ------------------------------------------------------------------------------------------


def read_completion(
    raw: str | bytes, run: str, prompt: str, steps: Sequence[int] = (1,), top: int = TOP
) -> Listing:
    """The steps of a completions answer (its body as received, so that digits can be seen).

    steps  numbers of generated tokens that must be there, the first is 1
    top    how many tokens every list must have

    Whatever is missing or malformed becomes a finding; a document that is no completion at all
    raises ValueError.
    """
    document = json.loads(raw, parse_float=Printed, parse_int=int)
    if not isinstance(document, dict) or not document.get("choices"):
        raise ValueError(f"no completion: {str(document)[:200]!r}")
    table = document["choices"][0].get("logprobs")
    if not table:
        where = f"{run} / {prompt}"
        missing = Finding("logprob-missing", where, "the answer has no logprobs at all")
        return Listing(run, prompt, (), (missing,))
    findings: list[Finding] = []
    found = [read_step(table, number, run, prompt, top, findings) for number in steps]
    texts = [entry.text for step in found if step for entry in step.top]
    findings += digits_findings(texts, f"{run} / {prompt}")
    return Listing(run, prompt, tuple(step for step in found if step), tuple(findings))


def read_step(
    table: Mapping, number: int, run: str, prompt: str, top: int, findings: list[Finding]
) -> Step | None:
    """One step of a completions logprobs table; adds what is wrong to `findings`."""
    at, where = number - 1, f"{run} / {prompt} / step {number}"

    def column(name: str) -> object:
        values = table.get(name)
        return values[at] if values and at < len(values) else None

    chosen, best = column("token_logprobs"), column("top_logprobs")
    if chosen is None or not best:
        what = "token_logprobs" if chosen is None else "top_logprobs"
        findings.append(Finding("logprob-missing", where, f"{what} has nothing for this step"))
        return None
    ids = column("top_token_ids")
    tokens = list(ids) if ids is not None else [token_of(key) for key in best]
    if len(best) < top or len(tokens) != len(best):
        name = "logprob-collision" if ids is None or len(ids) > len(best) else "logprob-missing"
        message = f"{len(best)} values for {len(tokens)} tokens where {top} were asked for"
        findings.append(Finding(name, where, message))
        return None
    entries = tuple(
        Entry(token, float(value), getattr(value, "text", str(value)))
        for token, value in zip(tokens, best.values(), strict=True)
    )
    token = column("token_ids")
    if token is None:
        token = token_of(column("tokens"))
    step = Step(number, token, float(chosen), entries, column("vocabulary_hash"))
    findings += step_findings(step, where)
    return step


def token_of(key: str) -> int | str:
    """`token_id:5` is id 5; any other text stands for itself."""
    prefix, _, rest = key.partition(":")
    return int(rest) if prefix == "token_id" and rest.isdigit() else key


def step_findings(step: Step, where: str) -> Iterable[Finding]:
    values = [entry.value for entry in step.top]
    wrong = [v for v in (*values, step.chosen) if math.isnan(v) or v > 0]
    if wrong:
        yield Finding("logprob-impossible", where, f"value {wrong[0]} where at most 0 can be")
    elif any(a < b for a, b in zip(values, values[1:], strict=False)):
        yield Finding("logprob-order", where, f"values {values} do not descend")


def digits_findings(texts: Sequence[str], where: str) -> Iterable[Finding]:
    short = [text for text in texts if loses_bits(text)]
    if short:
        message = (
            f"{len(short)} of {len(texts)} values are shortened, such as {short[0]} with "
            f"{significant_digits(short[0])} digits; {DIGITS_MIN} are needed"
        )
        yield Finding("logprob-digits", where, message, {"example": short[0], "count": len(short)})


# Comparing ----------------------------------------------------------------------------------------


def ordered(step: Step) -> list[Entry]:
    """The list by value, then by token."""
    return sorted(step.top, key=lambda entry: (-bits(entry.value), str(type(entry.token)),
                                               entry.token))


def compare(a: Listing, b: Listing, rerun: str) -> Judgement:
    """Bit identity of two listings of one prompt; `rerun` is the command that looks closer.

    Lists are compared by value, then id. Tokens whose value is that of the last place may differ
    as long as values and their number agree: the cut went through a tie, which is a warning.
    """
    assert a.prompt == b.prompt, f"prompts {a.prompt} and {b.prompt} are not the same"
    findings = [*a.findings, *b.findings]
    mine, theirs = ({step.number: step for step in listing.steps} for listing in (a, b))
    for number in sorted(mine.keys() ^ theirs.keys()):
        run = b.run if number in mine else a.run
        where = f"{run} / {a.prompt} / step {number}"
        findings.append(Finding("logprob-missing", where, "only the other run has this step"))
    common = sorted(mine.keys() & theirs.keys())
    for number in common:
        findings += compare_steps(a, b, mine[number], theirs[number], rerun)
    if not common:
        message = "no step is present in both runs"
        findings.append(Finding("nothing-compared", f"{a.prompt}: {a.run} and {b.run}", message))
    return Judgement(tuple(findings))


def compare_steps(a: Listing, b: Listing, x: Step, y: Step, rerun: str) -> Iterable[Finding]:
    def finding(name: str, token, first, second, severity: str = "error") -> Finding:
        data = {"prompt": a.prompt, "step": x.number, "token": token, a.run: first, b.run: second}
        words = f"token {token}: {a.run} has {first!r}, {b.run} has {second!r}"
        if isinstance(first, float) and isinstance(second, float):
            data["ulp"] = ulp_distance(first, second)
            words += f", {data['ulp']} ULP apart"
        where = f"{a.prompt} / step {x.number}"
        return Finding(name, where, f"{words}; next: {rerun}", data | {"next": rerun}, severity)

    if x.token != y.token:
        yield finding("token-differs", x.token, x.token, y.token)
    elif bits(x.chosen) != bits(y.chosen):
        yield finding("logprob-differs", x.token, x.chosen, y.chosen)
    if None not in (x.vocabulary_hash, y.vocabulary_hash) and (
        x.vocabulary_hash != y.vocabulary_hash
    ):
        yield finding("vocabulary-differs", x.token, x.vocabulary_hash, y.vocabulary_hash)
    first, second = ordered(x), ordered(y)
    if len(first) != len(second):
        yield finding("logprob-missing", x.token, f"{len(first)} entries", f"{len(second)} entries")
        return
    yield from compare_tops(first, second, finding)


def compare_tops(first: list[Entry], second: list[Entry], finding) -> Iterable[Finding]:
    """The first difference of two ordered lists, or a warning about a tie at the cut."""
    values = {entry.token: entry.value for entry in second}
    cut = bits(first[-1].value)
    for mine in first:
        if bits(mine.value) == cut:
            break
        if mine.token not in values:
            yield finding("top-differs", mine.token, mine.value, None)
            return
        if bits(mine.value) != bits(values[mine.token]):
            yield finding("logprob-differs", mine.token, mine.value, values[mine.token])
            return
    tied = [[e for e in entries if bits(e.value) == cut] for entries in (first, second)]
    if len(tied[0]) != len(tied[1]) or bits(second[-1].value) != cut:
        place = next((e for e in tied[0] if values.get(e.token) != e.value), tied[0][0])
        other = values.get(place.token)
        name = "top-differs" if other is None else "logprob-differs"
        yield finding(name, place.token, place.value, other)
    elif {e.token for e in tied[0]} != {e.token for e in tied[1]}:
        tokens = [[e.token for e in entries] for entries in tied]
        yield finding("tie-at-cut", tied[0][0].token, str(tokens[0]), str(tokens[1]), "warning")


# Runs that are stable only in distribution --------------------------------------------------------


def kl_divergence(x: Step, y: Step) -> float:
    """KL(x || y) in nats over the tokens both lists have, and one remainder for all others."""
    p, q = ({entry.token: math.exp(entry.value) for entry in step.top} for step in (x, y))
    both = p.keys() & q.keys()
    pairs = [(p[token], q[token]) for token in both]
    least = 2.0**-126
    pairs.append(tuple(max(1 - sum(d[t] for t in both), least) for d in (p, q)))
    return max(0.0, sum(a * math.log(max(a, least) / max(b, least)) for a, b in pairs))


def spread(pairs: Iterable[tuple[Listing, Listing]]) -> Spread:
    """How far apart two runs are over all steps they share."""
    values = identical = farthest = 0
    divergence = 0.0
    for a, b in pairs:
        theirs = {step.number: step for step in b.steps}
        for x in a.steps:
            if (y := theirs.get(x.number)) is None:
                continue
            other = {entry.token: entry.value for entry in y.top}
            for entry in x.top:
                values += 1
                if entry.token in other:
                    distance = ulp_distance(entry.value, other[entry.token])
                    identical += distance == 0
                    farthest = max(farthest, distance)
            divergence = max(divergence, kl_divergence(x, y))
    return Spread(values, identical, farthest, divergence)


def judge_spread(pairs: Sequence[tuple[Listing, Listing]], bound: Bound) -> Judgement:
    """Whether two runs stay within a stated bound; missing values fail as in `compare`."""
    findings = [f for a, b in pairs for listing in (a, b) for f in listing.findings]
    where = " and ".join(sorted({listing.run for pair in pairs for listing in pair}))
    for a, b in pairs:
        if [s.number for s in a.steps] != [s.number for s in b.steps]:
            message = "the runs have different steps"
            findings.append(Finding("logprob-missing", f"{a.prompt}: {where}", message))
    found = spread(pairs)
    if not found.values:
        findings.append(Finding("nothing-compared", where, "no step is present in both runs"))
        return Judgement(tuple(findings))
    checks = (
        ("share identical", found.share_identical, ">=", bound.share_identical_min),
        ("largest distance in ULP", found.ulp_max, "<=", bound.ulp_max),
        ("largest KL in nats", found.kl_max, "<=", bound.kl_max),
    )
    for what, value, relation, limit in checks:
        if value < limit if relation == ">=" else value > limit:
            message = f"{what} is {value:.6g}, the bound is {relation} {limit:.6g}"
            data = {"what": what, "value": value, "limit": limit, "values": found.values}
            findings.append(Finding("outside-bound", where, message, data))
    return Judgement(tuple(findings))
