"""What travels between the server, the scheduler and the core: plain data, no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class SequenceStep:
    """The part of one sequence that a step runs.

    slot        which window ring and open-group state belong to it, 0..max_concurrency-1
    start       position of the first id to run (everything before has been run in this slot)
    ids         the ids to run
    history     the ids before `start`, at least the last n-gram size - 1 of them if there are any
    pages       physical pages of the sequence, enough for positions 0..start+len(ids)-1
    logit_rows  indices into `ids` of the rows whose logits are wanted, ascending
    """

    slot: int
    start: int
    ids: tuple[int, ...]
    history: tuple[int, ...]
    pages: tuple[int, ...]
    logit_rows: tuple[int, ...]


@dataclass(frozen=True)
class DraftStep:
    """Ask for drafts after position `position`, the last the target has run in `slot`; `next_id`
    is the id just chosen for the following position."""

    slot: int
    position: int
    next_id: int


@dataclass(frozen=True)
class Drafts:
    """ids int64 [sequences, drafts], logits fp32 [sequences, drafts, vocabulary],
    confidence fp32 [sequences, drafts]."""

    ids: np.ndarray
    logits: np.ndarray
    confidence: np.ndarray


class Core(Protocol):
    """The running model as the scheduler sees it; one step at a time, all ranks behind it.

    tokens_per_step_max bounds the ids of one step over all sequences. A step with one id per
    sequence (or 1 + drafts) runs the decode graph, anything else the prefill graph; which one
    is no concern of the caller, results do not depend on it.
    """

    slots: int
    pages: int
    page_tokens: int
    positions_max: int
    tokens_per_step_max: int
    vocab_size: int
    draft_tokens: int

    def step(self, sequences: Sequence[SequenceStep]) -> list[np.ndarray]:
        """Run ids of some sequences; logits fp32 [len(logit_rows), vocabulary] of each."""
        ...

    def draft(self, sequences: Sequence[DraftStep]) -> Drafts:
        """Run the draft blocks for some sequences (only if draft_tokens > 0)."""
        ...

    def export_window(self, slot: int) -> bytes:
        """The slot's window rings, so that a prefix hit can restore them."""
        ...

    def import_window(self, slot: int, state: bytes) -> None:
        """Restore what `export_window` gave, into a slot."""
        ...

    def export_page(self, page: int) -> bytes:
        """The packed bytes of one page on every rank (they are equal)."""
        ...

    def import_page(self, page: int, content: bytes) -> None:
        """Write what `export_page` gave."""
        ...

    def close(self) -> None:
        """End all ranks."""
        ...
