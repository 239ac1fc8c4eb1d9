"""From a step's logits to delivered tokens: prompt rows, choice, verification of drafts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from engine.sampler import check_logits, choose, logprobs
from engine.sequence import Sequence, Token


@dataclass
class SchedulerStats:
    """Counters since the start; draft lists are indexed by the draft's position, `ended` by the
    reason."""

    drafts_proposed: list[int]
    drafts_accepted: list[int]
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    ended: Counter = field(default_factory=Counter)

    @classmethod
    def for_drafts(cls, count: int) -> SchedulerStats:
        """All counters at zero, with `count` draft positions."""
        return cls([0] * count, [0] * count)


@dataclass(frozen=True)
class Part:
    """A sequence's part of a step: `known` ids, then `drafts` to be verified; logits are wanted
    of `rows` (indices into both together)."""

    sequence: Sequence
    known: int
    drafts: tuple[int, ...]
    rows: tuple[int, ...]


def deliver(part: Part, start: int, logits: np.ndarray, stats: SchedulerStats) -> str | None:
    """Report prompt rows, choose tokens, verify drafts; the reason if the sequence is over.

    `start` is the position of the part's first id, logits are fp32 [rows, vocabulary]. A draft is
    accepted when the token chosen from the target's own row equals it. As a draft is one fixed
    guess, this is exact rejection sampling: it is kept with the target's probability of it, and
    a token chosen instead has the target's distribution without it. Every token is the one that
    would be chosen with drafts off. Raises BrokenLogitsError.
    """
    sequence, request = part.sequence, part.sequence.request
    for row, values in zip(part.rows, logits, strict=True):
        check_logits(values)
        position = start + row + 1
        if position < len(request.ids):
            count = request.prompt_logprobs
            request.sink.prompt(position, logprobs(values, request.ids[position], count))
            sequence.prompt_reported = position
            continue
        reason, token = _next_token(sequence, values, stats)
        accepted = _verify(part, row - part.known + 1, token, stats)
        sequence.computed += accepted
        if reason is not None or not accepted:
            return reason
    return "length" if sequence.left == 0 else None


def _next_token(sequence: Sequence, values: np.ndarray, stats: SchedulerStats):
    """Choose and hand over one token; the reason if it is the last, and the token."""
    request = sequence.request
    index = sequence.produced
    token = choose(values, request.sampling, index)
    report = None if request.logprobs is None else logprobs(values, token, request.logprobs)
    sequence.ids.append(token)
    stats.generation_tokens += request.counted
    stopped = request.sink.token(Token(index, token, report))
    if stopped or token in request.stop_ids:
        return "stop", token
    return ("length" if sequence.wanted == 0 else None), token


def _verify(part: Part, draft: int, token: int, stats: SchedulerStats) -> bool:
    """Whether the token at that draft's place is the draft; False behind the last draft."""
    if draft >= len(part.drafts):
        return False
    accepted = token == part.drafts[draft]
    stats.drafts_proposed[draft] += 1
    stats.drafts_accepted[draft] += accepted
    return accepted
