"""Devices: what is missing is named, memory is read where it counts, streams keep the order."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine import device
from engine.device import CudaFacts, CudaStreams, check_cuda, device_memory, probe
from engine.errors import UsageError
from engine.hostmem import HostMemory
from engine.ir import Graph, Op
from engine.rank import backend_of
from engine.recipe import Recipe
from tests.engine.cuda_on_cpu import FakeCuda

GOOD = CudaFacts("2.13.0", "13.0", ("GB10", "other"), nccl=True)


@pytest.mark.parametrize(
    ("facts", "index", "ranks", "said"),
    (
        (replace(GOOD, build=None), 0, 1, "--gpus 0: torch 2.13.0 is built without CUDA"),
        (replace(GOOD, devices=()), 0, 1, "for CUDA 13.0 finds no device; a driver for that"),
        (GOOD, 2, 1, "--gpus 2: no such device; accepted: 0 (GB10), 1 (other), or cpu"),
        (replace(GOOD, nccl=False), 0, 3, "is built without NCCL, which 3 ranks on GPUs need"),
    ),
)
def test_what_a_gpu_lacks_is_named(facts, index, ranks, said):
    with pytest.raises(UsageError) as raised:
        check_cuda(facts, index, ranks)
    assert said in str(raised.value)


@pytest.mark.parametrize(("index", "ranks"), ((0, 1), (1, 3)))
def test_a_gpu_that_has_everything_is_accepted(index, ranks):
    check_cuda(GOOD, index, ranks)
    check_cuda(replace(GOOD, nccl=False), index, 1)


def test_a_cuda_recipe_without_cuda_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(device, "read_cuda", lambda: replace(GOOD, build=None, devices=()))
    with pytest.raises(UsageError, match="--gpus 0: .* built without CUDA"):
        backend_of(Recipe(device="cuda"))


def test_a_device_for_which_torch_has_no_code_is_refused_by_name(monkeypatch):
    def full(*_, **__):
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(torch, "full", full)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (12, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GB10")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    with pytest.raises(UsageError, match=r"GB10 \(sm_121\) runs no .* sm_80, sm_90: no kernel"):
        probe(0)


@pytest.mark.parametrize(
    ("integrated", "expected"),
    ((1, (128, 100, "MemAvailable")), (0, (139, 120, "cudaMemGetInfo"))),
)
def test_an_integrated_gpu_has_the_memory_that_the_host_has(integrated, expected, monkeypatch):
    properties = SimpleNamespace(is_integrated=integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (120, 139))
    found = device_memory(0, lambda: HostMemory(128, 3, 100))
    assert (found.total_bytes, found.available_bytes, found.source) == expected


# Streams ----------------------------------------------------------------------------------------


def op(name: str, stream: str = "compute", waits: tuple[str, ...] = ()) -> Op:
    return Op(name, "norm", (), (), stream=stream, waits=waits)


OPS = (
    op("a"),
    op("send", "comm", ("a",)),
    op("b"),
    op("c", waits=("send",)),
    op("copy", "copy", ("c", "send")),
    op("send_again", "comm", ("c",)),
)


@contextmanager
def issued(monkeypatch, ops):
    """Names of ops by the moment they are issued and the streams' own records of order."""
    cuda = FakeCuda(monkeypatch)
    streams = CudaStreams(torch.device("cuda", 0))
    runs = {o.name: [lambda o=o: cuda.note(o.name)] for o in ops}
    yield cuda, streams.program(Graph("g", {}, tuple(ops), {}), runs)


def test_ops_are_issued_in_order_each_on_its_stream(monkeypatch):
    with issued(monkeypatch, OPS) as (cuda, program):
        for run in program:
            run()
    assert [name for name, _ in cuda.notes] == [o.name for o in OPS]
    by_stream = {o.stream: stream for o, (_, stream) in zip(OPS, cuda.notes, strict=True)}
    assert len(set(by_stream.values())) == len(by_stream) == 3
    assert by_stream["compute"] is cuda.default


@pytest.mark.parametrize("runs", (1, 2))
def test_every_wait_of_the_graph_is_kept_by_the_device(monkeypatch, runs):
    with issued(monkeypatch, OPS) as (cuda, program):
        for run in program * runs:
            run()
    for o in OPS:
        for waited in o.waits:
            assert cuda.happens_before(waited, o.name), f"{o.name} may start before {waited}"
    # And what runs side by side in the graph does so on the device.
    assert not cuda.happens_before("send", "b", last=True)


def test_a_run_ends_with_all_its_streams(monkeypatch):
    with issued(monkeypatch, OPS) as (cuda, program):
        for run in program:
            run()
    cuda.note("after")
    for o in OPS:
        assert cuda.happens_before(o.name, "after"), f"{o.name} may still run when outputs are read"
    for run in program:
        run()
    assert cuda.happens_before("after", "send", last=True)


def test_a_wait_without_its_event_is_found(monkeypatch):
    bare = tuple(replace(o, waits=()) for o in OPS)
    with issued(monkeypatch, bare) as (cuda, program):
        for run in program:
            run()
    assert not cuda.happens_before("a", "send")
