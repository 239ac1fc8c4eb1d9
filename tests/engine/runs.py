"""Sequences run on local ranks in every way that may not move a bit, and the comparison of bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from engine.request import DraftStep, SequenceStep
from fixtures.local_ranks import LocalRanks

MINI = Path(__file__).parents[2] / "fixtures" / "goldens" / "mini"


def some_ids(seed: int, count: int, vocab_size: int = 512) -> tuple[int, ...]:
    """Token ids drawn from one seed."""
    return tuple(np.random.default_rng(seed).integers(0, vocab_size, count).tolist())


def assert_same_bits(found: np.ndarray, expected: np.ndarray, what: str = "logits") -> None:
    """Equal shape, dtype and bytes; names the first difference."""
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, not {expected.shape}"
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}, not {expected.dtype}"
    if found.tobytes() != np.ascontiguousarray(expected).tobytes():
        wrong = np.argwhere(found != expected)
        at = wrong[0].tolist() if len(wrong) else "the sign of a zero or a NaN"
        raise AssertionError(f"{what}: {len(wrong)} of {expected.size} differ, the first at {at}")


def in_pieces(
    ranks: LocalRanks,
    ids: Sequence[int],
    sizes: Iterable[int],
    *,
    start: int = 0,
    slot: int = 0,
    pages: Sequence[int] | None = None,
) -> np.ndarray:
    """Logits of ids[start:] run in steps of the given sizes, the last of them again and again."""
    found, at, size = [], start, 0
    sizes = iter(sizes)
    while at < len(ids):
        size = next(sizes, size)
        part = ids[at : at + size]
        found.extend(ranks.step(ranks.sequence(ids, at, part, slot, pages)))
        at += len(part)
    return np.concatenate(found)


def draft_bits(ranks: LocalRanks, ids: Sequence[int], position: int, slot: int = 0) -> bytes:
    """Everything the draft blocks say behind `position`, of which ids[position + 1] follows."""
    drafts = ranks.draft(DraftStep(slot, position, ids[position + 1]))
    return b"".join(a.tobytes() for a in (drafts.ids, drafts.logits, drafts.confidence))


def interleaved(
    ranks: LocalRanks, sequences: Sequence[Sequence[int]], slots: Sequence[int], seed: int
) -> list[np.ndarray]:
    """Logits of several sequences that share steps: each joins late or early, each step runs one to
    twelve ids of some of them, so prompts and single ids meet in one step."""
    draw = np.random.default_rng(seed)
    done = [0] * len(sequences)
    found: list[list[np.ndarray]] = [[] for _ in sequences]
    while any(at < len(ids) for at, ids in zip(done, sequences, strict=True)):
        steps: list[tuple[int, SequenceStep]] = []
        for number in draw.permutation(len(sequences)).tolist():
            ids, at = sequences[number], done[number]
            size = int(draw.choice((0, 1, 1, 2, 5, 12)))
            if part := ids[at : at + size]:
                steps.append((number, ranks.sequence(ids, at, part, slots[number])))
                done[number] += len(part)
        if steps:
            logits = ranks.step(*(step for _, step in steps))
            for (number, _), rows in zip(steps, logits, strict=True):
                found[number].append(rows)
    return [np.concatenate(rows) for rows in found]


def states_of(ranks: LocalRanks) -> list[dict[str, bytes]]:
    """The bytes of every state (caches, rings, open groups) by rank and name."""
    found = []
    for model in ranks.models:
        names = {t.name for g in model.graphs.values() for t in g.of_kind("state")}
        found.append({name: model.persistent[name].tobytes() for name in sorted(names)})
    return found
