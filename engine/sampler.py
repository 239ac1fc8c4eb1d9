"""From one row of logits to a token and its log-probabilities: a pure function of row and seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.errors import SparkproofError

LOGPROBS_MAX = 20
"""Most alternatives that one position may report."""
_NUCLEUS_FIRST = 1024


class BrokenLogitsError(SparkproofError):
    """Logits that are no distribution (NaN, +inf, all -inf): the model failed, not the caller."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy, top_k 0 and top_p 1 keep everything.

    `seed` and `choice` (the number of the alternative under `n`) fix every random draw, so a
    request's tokens do not depend on who shares its batch, on drafts, or on a preemption.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0

    def for_choice(self, choice: int) -> Sampling:
        """The same with draws of its own."""
        return replace(self, choice=choice)


@dataclass(frozen=True)
class Logprobs:
    """Log-probability of the chosen id, and the best ids in order; values are fp32 as floats."""

    chosen: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


def check_logits(row: np.ndarray) -> None:
    """Raise BrokenLogitsError unless the row is a distribution; -inf marks an impossible id."""
    highest = row.max()
    if np.isnan(highest) or not np.isfinite(highest):
        raise BrokenLogitsError(
            f"the model's logits have the maximum {highest}; a finite number is needed"
        )


def choose(row: np.ndarray, sampling: Sampling, index: int) -> int:
    """The id of the request's `index`-th new token from fp32 logits [vocabulary].

    Greedy takes the highest logit, the lowest id on a tie. Otherwise top_k, then top_p cut the
    tempered distribution (float64), and one uniform number picks from what is left.
    """
    if sampling.temperature == 0:
        return int(np.argmax(row))
    scaled = row.astype(np.float64)
    with np.errstate(over="ignore"):
        scaled = (scaled - scaled.max()) / sampling.temperature
    weights = np.exp(scaled)
    uniform = draw(sampling.seed, sampling.choice, index)
    if sampling.top_k == 0 and sampling.top_p == 1:
        return _pick(range(len(row)), weights, uniform)
    ids = _kept(row, weights, sampling)
    return _pick(ids, weights[ids], uniform)


def _kept(row: np.ndarray, weights: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Ids that top_k and top_p leave, ascending; the id that crosses top_p is the last of them."""
    count = min(sampling.top_k or len(row), len(row))
    if sampling.top_p < 1:
        count = _nucleus(weights, count, sampling.top_p)
    least = _highest(row, count).min()
    above = np.flatnonzero(row > least)
    equal = np.flatnonzero(row == least)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(weights: np.ndarray, count: int, top_p: float) -> int:
    """How many of the `count` highest weights it takes to reach top_p of their sum.

    A few of them are tried first: sorting a whole vocabulary takes 10 ms, and is rarely needed.
    """
    wanted = top_p * (weights.sum() if count == len(weights) else _highest(weights, count).sum())
    for width in (min(count, _NUCLEUS_FIRST), count):
        sums = np.cumsum(np.sort(_highest(weights, width))[::-1])
        if sums[-1] >= wanted:
            break
    return min(count, int(np.searchsorted(sums, wanted, side="left")) + 1)


def _highest(values: np.ndarray, count: int) -> np.ndarray:
    return np.partition(values, len(values) - count)[len(values) - count :]


def _pick(ids: Sequence[int] | np.ndarray, weights: np.ndarray, uniform: float) -> int:
    """The id in whose share of the summed weights `uniform` in [0, 1) falls."""
    sums = np.cumsum(weights)
    place = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    if place == len(ids):
        # uniform * sum has rounded up to the sum itself: the last id with any weight is meant.
        place = int(np.flatnonzero(weights)[-1])
    return int(ids[place])


def draw(seed: int, choice: int, index: int) -> float:
    """A uniform number in [0, 1) with 53 bits, a hash of its arguments (equal on every machine)."""
    text = f"{seed}/{choice}/{index}".encode()
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11) * 2.0**-53


def log_softmax(row: np.ndarray) -> np.ndarray:
    """fp32 log-probabilities of fp32 logits: float64 inside, rounded once."""
    wide = row.astype(np.float64)
    wide -= wide.max()
    return (wide - np.log(np.exp(wide).sum())).astype(np.float32)


def top(values: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` highest values, highest first; the lower id first (and kept) on a tie."""
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, dtype=np.int64)
    least = _highest(values, count).min()
    candidates = np.flatnonzero(values >= least)
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


def logprobs(row: np.ndarray, chosen: int, count: int) -> Logprobs:
    """The log-probability of `chosen` and of the `count` best ids of one row of logits.

    Order and cut follow the reported fp32 values. An impossible id (-inf) is reported as the
    lowest finite fp32, since JSON has no infinity.
    """
    values = np.maximum(log_softmax(row), np.finfo(np.float32).min)
    ids = top(values, count)
    return Logprobs(
        float(values[chosen]), tuple(int(i) for i in ids), tuple(float(v) for v in values[ids])
    )
