"""Models on a chosen backend, what their ops leave behind, and how far a layer is from a golden."""

from __future__ import annotations

import datetime
import threading
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

import fixtures.local_ranks
from engine.comm import Communicator
from engine.ops.bind import Backend
from engine.rank import RankModel
from engine.recipe import Recipe
from fixtures.local_ranks import LocalRanks
from tests.engine.test_goldens import GOLDENS, TENSOR_OF, Trace

GROUP_TIMEOUT = datetime.timedelta(seconds=60)


class DeviceTrace(Trace):
    """What ops leave behind, copied to the host, bf16 as uint16."""

    def _observer(self, rank: int):
        def note(op, binding) -> None:
            for name in op.outputs:
                if binding.tensor(name).kind != "state":
                    self.seen[rank][name] = binding.backend.host(binding.array(name)).copy()

        return note


def recipe(ranks: int, accumulation: str = "float64") -> Recipe:
    """The recipe of the goldens; float32 needs the device for which it is meant."""
    device = "cpu" if accumulation == "float64" else "cuda"
    return Recipe(
        ranks=ranks,
        max_concurrency=4,
        mtp_draft_tokens=5,
        prefill_chunk=512,
        accumulation=accumulation,
        device=device,
    )


def local_ranks(
    patch, backend: Backend, chosen: Recipe, groups: list[dist.ProcessGroup] | None = None, **more
) -> LocalRanks:
    """All ranks as threads on a backend; with groups, data travels over torch.distributed."""

    def build(*args) -> RankModel:
        head, mesh, tail = args[:7], args[7], args[8:]
        comm = mesh if groups is None else Communicator(groups[mesh.rank], mesh.rank, mesh.ranks)
        return RankModel(*head, comm, *tail, backend=backend)

    patch.setattr(fixtures.local_ranks, "RankModel", build)
    return LocalRanks(GOLDENS, chosen, **more)


def gloo_groups(ranks: int) -> list[dist.ProcessGroup]:
    """Connected gloo groups for threads of one process."""
    store, groups = dist.HashStore(), [None] * ranks

    def join(rank: int) -> None:
        kind = dist.ProcessGroup.BackendType.GLOO
        group = dist.ProcessGroup(store, rank, ranks)
        group._set_default_backend(kind)
        gloo = dist.ProcessGroupGloo(store, rank, ranks, GROUP_TIMEOUT)
        group._register_backend(torch.device("cpu"), kind, gloo)
        groups[rank] = group

    threads = [threading.Thread(target=partial(join, rank)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in groups, "a rank did not join its group"
    return groups


def as_tensor(values: np.ndarray) -> torch.Tensor:
    """Golden values, bf16 bits as bf16."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.view(torch.bfloat16) if values.dtype == np.uint16 else tensor


def row_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative L2 distance of a row."""
    found, expected = found.cpu().double().flatten(1), expected.double().flatten(1)
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


class Layerwise:
    """Feeds every layer the saved inputs: the streams, the mix and the selection of the golden.

    errors  per golden tensor, the largest relative L2 distance of a row before it was put right
    """

    def __init__(self, golden: dict[str, np.ndarray]) -> None:
        self.golden = golden
        self.errors: dict[str, float] = {}
        self._layers = sum(key.startswith("resid.") for key in golden)
        self._judged = {
            pattern.format(layer): f"{key}.{layer}"
            for key, pattern in TENSOR_OF.items()
            for layer in range(self._layers)
        }

    def observe(self, op, binding) -> None:
        """Called after each op."""
        for name in op.outputs:
            key = self._judged.get(name)
            if key in self.golden:
                found, expected = binding.array(name), as_tensor(self.golden[key])
                self.errors[key] = row_error(found, expected)
                found.copy_(expected)
                if key.startswith("resid."):
                    self._hand_on_mix(binding, key.removeprefix("resid."))
        if op.kind == "select":
            self._choose(op.outputs, binding)

    def _hand_on_mix(self, binding, layer: str) -> None:
        mix = as_tensor(self.golden[f"pre_mix.{layer}"])
        binding.array(f"layers.{layer}.ffn.mixes")[:, : mix.shape[1]].copy_(mix)

    def _choose(self, outputs, binding) -> None:
        layer = outputs[0].split(".")[1]
        selected, topk = binding.array(outputs[0]), as_tensor(self.golden[f"topk.{layer}"])
        selected.fill_(-1)
        selected[:, : topk.shape[1]].copy_(topk)
        if len(outputs) > 1:
            blocks, mask = binding.array(outputs[1]), self.golden[f"candidates.{layer}"]
            size = binding.config.candidate_block_size
            blocks.fill_(-1)
            for row, chosen in enumerate(mask[:, ::size]):
                numbers = torch.from_numpy(np.flatnonzero(chosen))
                blocks[row, : len(numbers)] = numbers.to(blocks)
