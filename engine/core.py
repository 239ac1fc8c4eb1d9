"""The running model behind the scheduler: rank 0 decides each step, the others follow it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.batch import batch_from_bytes, draft_batch, step_batch
from engine.errors import PeerLostError
from engine.mesh import Mesh
from engine.model.graphs import draft_block_size
from engine.rank import RankModel
from engine.request import Drafts, DraftStep, SequenceStep

_STEP, _DRAFT, _WINDOW, _PAGE, _END = (bytes([kind]) for kind in range(5))


class LeadCore:
    """Rank 0's core (see `request.Core`): every call is told to all ranks, then run.

    fold  int32 or int64 [vocabulary], the Engram id of every token id
    """

    def __init__(self, model: RankModel, mesh: Mesh, fold: np.ndarray) -> None:
        recipe, config = model.recipe, model.config
        self._model = model
        self._mesh = mesh
        self._fold = fold
        self._open = True
        self.slots = recipe.max_concurrency
        self.pages = model.pages
        self.page_tokens = recipe.kv_page_tokens
        self.positions_max = config.max_position_embeddings
        self.tokens_per_step_max = max(
            recipe.prefill_chunk, model.graphs["decode"].limits["T"]
        )
        self.vocab_size = config.vocab_size
        self.draft_tokens = recipe.mtp_draft_tokens if "draft" in model.graphs else 0
        self._block = draft_block_size(config, recipe)
        self._pages_max = model.layout.pages_per_sequence_max

    def step(self, sequences: Sequence[SequenceStep]) -> list[np.ndarray]:
        """Run ids of some sequences; logits fp32 [len(logit_rows), vocabulary] of each."""
        self._check_steps(sequences)
        batch = step_batch(self._graph_for(sequences), sequences, self._model.config, self._fold)
        self._tell(_STEP, batch.to_bytes())
        logits = self._model.step(batch)
        borders = np.cumsum([len(s.logit_rows) for s in sequences])[:-1]
        return np.split(logits, borders)

    def _graph_for(self, sequences: Sequence[SequenceStep]) -> str:
        short = all(len(s.ids) <= 1 + self.draft_tokens for s in sequences)
        rows = sum(len(s.ids) for s in sequences)
        if short and rows <= self._model.graphs["decode"].limits["T"]:
            return "decode"
        assert rows <= self._model.graphs["prefill"].limits["T"], (
            f"a step of {rows} rows; the prefill graph takes "
            f"{self._model.graphs['prefill'].limits['T']}"
        )
        return "prefill"

    def _check_steps(self, sequences: Sequence[SequenceStep]) -> None:
        assert 0 < len(sequences) <= self.slots, f"{len(sequences)} sequences, {self.slots} slots"
        used = [s.slot for s in sequences]
        assert len(set(used)) == len(used), f"slots {used}: one is used twice"
        assert all(0 <= slot < self.slots for slot in used), f"slots {used} of {self.slots}"
        for s in sequences:
            past = s.start + len(s.ids)
            assert s.ids and past <= self.positions_max, f"positions {s.start}..{past}"
            held = len(s.pages) * self.page_tokens
            assert held >= past, f"pages for {held} tokens, {past} are needed"
            assert len(s.pages) <= self._pages_max, f"{len(s.pages)} pages of {self._pages_max}"
            assert all(0 <= p < self.pages for p in s.pages), f"pages {s.pages} of {self.pages}"
            assert all(0 <= i < self.vocab_size for i in s.ids), "an id outside the vocabulary"
            assert all(0 <= r < len(s.ids) for r in s.logit_rows), f"rows {s.logit_rows} of a step"

    def draft(self, sequences: Sequence[DraftStep]) -> Drafts:
        """Run the draft blocks for some sequences."""
        assert self.draft_tokens, "the package was exported without drafts"
        used = [s.slot for s in sequences]
        assert used and len(set(used)) == len(used), f"slots {used}: none, or one twice"
        assert all(0 <= slot < self.slots for slot in used), f"slots {used} of {self.slots}"
        assert all(0 <= s.next_id < self.vocab_size for s in sequences), "an id outside"
        batch = draft_batch(sequences, self._model.config, self._block)
        self._tell(_DRAFT, batch.to_bytes())
        ids, logits, confidence = self._model.draft(batch)
        kept = slice(None), slice(0, self.draft_tokens)
        return Drafts(ids[kept], logits[kept], confidence[kept])

    def export_window(self, slot: int) -> bytes:
        """Rings and open groups of a slot; equal on every rank."""
        return self._model.export_window(slot)

    def import_window(self, slot: int, state: bytes) -> None:
        """Restore a slot's rings and open groups on every rank."""
        # Here first: what does not fit must not reach the others.
        self._model.import_window(slot, state)
        self._tell(_WINDOW, slot.to_bytes(4, "little") + state)

    def export_page(self, page: int) -> bytes:
        """The packed bytes of a page; equal on every rank."""
        return self._model.read_page(page)

    def import_page(self, page: int, content: bytes) -> None:
        """Write a page on every rank."""
        size = self._model.layout.page_bytes
        assert len(content) == size, f"a page has {size} bytes, not {len(content)}"
        self._model.write_page(page, content)
        self._tell(_PAGE, page.to_bytes(4, "little") + content)

    def warm_up(self) -> None:
        """Run every graph once, so that kernels are compiled before the first request."""
        chunk = self._model.recipe.prefill_chunk
        room = min(self.positions_max, self.pages * self.page_tokens)
        rows = max(1, min(chunk, 2 * self.page_tokens, room - 1))
        pages = tuple(range(-(-(rows + 1) // self.page_tokens)))
        first = SequenceStep(0, 0, (0,) * rows, (), pages, (rows - 1,))
        self.step([first])
        self.step([replace(first, start=rows, ids=(0,), history=(0,) * rows, logit_rows=(0,))])
        if self.draft_tokens:
            self.draft([DraftStep(0, rows, 0)])

    def _tell(self, kind: bytes, body: bytes) -> None:
        assert self._open, "the core is closed"
        self._mesh.broadcast(kind + body)

    def close(self) -> None:
        """End all ranks; a rank that is gone already needs no word."""
        if not self._open:
            return
        self._open = False
        # Whoever closes after a loss has been told of it by the step that failed.
        with contextlib.suppress(PeerLostError):
            self._mesh.broadcast(_END)
        self._mesh.close()
        self._model.close()


def follow(model: RankModel, mesh: Mesh) -> None:
    """Run what rank 0 tells until it ends the core. Raises PeerLostError when a rank is gone."""
    try:
        while (message := mesh.receive_message(0))[:1] != _END:
            _obey(model, message[:1], message[1:])
    finally:
        mesh.close()
        model.close()


def _obey(model: RankModel, kind: bytes, body: bytes) -> None:
    if kind == _STEP:
        model.step(batch_from_bytes(body))
    elif kind == _DRAFT:
        model.draft(batch_from_bytes(body))
    elif kind == _WINDOW:
        model.import_window(int.from_bytes(body[:4], "little"), body[4:])
    elif kind == _PAGE:
        model.write_page(int.from_bytes(body[:4], "little"), body[4:])
    else:
        raise AssertionError(f"a message of unknown kind {kind!r} with {len(body)} bytes")
