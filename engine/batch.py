"""One step as arrays: what rank 0 sends to all ranks and what fills the graphs' inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from engine.config import ModelConfig
from engine.request import DraftStep, SequenceStep


@dataclass(frozen=True)
class Batch:
    """The inputs of one run of a graph; T rows of S sequences.

    ids, positions int64 [T]; seq_of int32 [T]; ngrams int64 [T, n]; first_row int32 [S + 1];
    start int64 [S]; slots int32 [S]; pages int32 [S, most]; logit_rows int32 [wanted rows]
    """

    graph: str
    ids: np.ndarray
    positions: np.ndarray
    seq_of: np.ndarray
    ngrams: np.ndarray
    first_row: np.ndarray
    start: np.ndarray
    slots: np.ndarray
    pages: np.ndarray
    logit_rows: np.ndarray

    @property
    def rows(self) -> int:
        """T."""
        return len(self.ids)

    @property
    def sequences(self) -> int:
        """S."""
        return len(self.start)

    @property
    def inputs(self) -> Mapping[str, np.ndarray]:
        """Arrays by the name of the io tensor they fill."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_INPUTS}

    def to_bytes(self) -> bytes:
        """A header line of names, dtypes and shapes, then the arrays."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "graph"}
        described = {k: [v.dtype.str, list(v.shape)] for k, v in arrays.items()}
        header = json.dumps({"graph": self.graph, "arrays": described}).encode() + b"\n"
        return header + b"".join(np.ascontiguousarray(v).tobytes() for v in arrays.values())


_NOT_INPUTS = ("graph", "logit_rows")


def batch_from_bytes(message: bytes) -> Batch:
    """The batch that `to_bytes` wrote."""
    header, _, body = message.partition(b"\n")
    document = json.loads(header)
    arrays, at = {}, 0
    for name, (dtype, shape) in document["arrays"].items():
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(body, kind, count, at).reshape(shape)
        at += count * kind.itemsize
    return Batch(graph=document["graph"], **arrays)


def step_batch(
    graph: str, steps: Sequence[SequenceStep], config: ModelConfig, fold: np.ndarray
) -> Batch:
    """The batch of some sequences' steps; `fold` [vocabulary] gives the Engram id of an id."""
    lengths = [len(step.ids) for step in steps]
    first_row = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    ngrams = [_ngrams(step, config, fold) for step in steps]
    pages = np.zeros((len(steps), max(len(s.pages) for s in steps)), np.int32)
    for row, step in zip(pages, steps, strict=True):
        row[: len(step.pages)] = step.pages
    wanted = [first + r for first, s in zip(first_row, steps, strict=False) for r in s.logit_rows]
    return Batch(
        graph=graph,
        ids=np.concatenate([np.asarray(s.ids, np.int64) for s in steps]),
        positions=np.concatenate([s.start + np.arange(len(s.ids), dtype=np.int64) for s in steps]),
        seq_of=np.repeat(np.arange(len(steps), dtype=np.int32), lengths),
        ngrams=np.concatenate(ngrams),
        first_row=first_row,
        start=np.asarray([s.start for s in steps], np.int64),
        slots=np.asarray([s.slot for s in steps], np.int32),
        pages=pages,
        logit_rows=np.asarray(wanted, np.int32),
    )


def _ngrams(step: SequenceStep, config: ModelConfig, fold: np.ndarray) -> np.ndarray:
    """Folded ids [rows, n], column k the id k positions back; before the start the folded pad."""
    if not config.engram_layer_ids:
        return np.zeros((len(step.ids), 0), np.int64)
    back = config.engram_max_ngram_size - 1
    known = step.history[len(step.history) - min(back, step.start) :] if back else ()
    assert len(known) == min(back, step.start), (
        f"{len(step.history)} ids of history at position {step.start}, {back} are needed"
    )
    pad = int(fold[config.engram_pad_token_id])
    ids = np.asarray([*known, *step.ids], np.int64)
    line = np.concatenate((np.full(back - len(known), pad, np.int64), fold[ids]))
    rows = len(step.ids)
    return np.stack([line[back - k : back - k + rows] for k in range(back + 1)], axis=1)


def draft_batch(steps: Sequence[DraftStep], config: ModelConfig, block: int) -> Batch:
    """The draft inputs [next id, noise, ...] of some sequences, `block` rows each."""
    count = len(steps)
    ids = np.full((count, block), config.dspark_noise_token_id, np.int64)
    ids[:, 0] = [step.next_id for step in steps]
    start = np.asarray([step.position + 1 for step in steps], np.int64)
    return Batch(
        graph="draft",
        ids=ids.reshape(-1),
        positions=(start[:, None] + np.arange(block)).reshape(-1),
        seq_of=np.repeat(np.arange(count, dtype=np.int32), block),
        ngrams=np.zeros((count * block, 0), np.int64),
        first_row=np.arange(count + 1, dtype=np.int32) * block,
        start=start,
        slots=np.asarray([step.slot for step in steps], np.int32),
        pages=np.zeros((count, 1), np.int32),
        logit_rows=np.zeros(0, np.int32),
    )
