"""The whole model through the reference kernels: goldens, gloo, streams, float32, CUDA."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.device import CudaStreams, cuda_backend, device_memory
from engine.executor import NATIVE
from engine.ops.reference import attention
from engine.ops.reference.backend import TorchBackend
from engine.recipe import ACCUMULATIONS
from engine.request import DraftStep
from engine.units import GIB
from tests.engine.cuda_on_cpu import FakeCuda
from tests.engine.test_goldens import LENGTHS, assert_same_bits, found_in_trace, golden
from tests.engine.traces import DeviceTrace, Layerwise, gloo_groups, local_ranks, recipe

LAYER_ERROR_MAX = 2e-2
"""Relative L2 distance of a row of one layer's output when products add up in float32."""


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def traced():
    trace = DeviceTrace(1)
    with (
        pytest.MonkeyPatch.context() as patch,
        local_ranks(patch, TorchBackend(), recipe(1), observers=trace.observers) as ranks,
    ):
        yield ranks, trace


def assert_prefill(ranks, trace, count: int) -> None:
    expected = golden(f"prefill_{count}")
    logits = ranks.prefill(expected.pop("input_ids").tolist())
    assert_same_bits(logits, expected.pop("logits_all"), "logits_all")
    assert_same_bits(logits[-1], expected.pop("logits"), "logits")
    assert len(expected) > 30
    for key, value in expected.items():
        assert_same_bits(found_in_trace(key, trace, ranks, count), value, key)


def assert_decode(ranks, count: int, steps: int | None = None) -> None:
    """The first steps of a decode with drafts, or all."""
    ids, expected = golden(f"prefill_{count}")["input_ids"].tolist(), golden(f"decode_{count}")
    tokens = expected["tokens"].tolist()
    assert int(ranks.prefill(ids, slot=1)[-1].argmax()) == tokens[0]
    for i, (token, following) in enumerate(zip(tokens[:-1][:steps], tokens[1:], strict=False)):
        (logits,) = ranks.step(ranks.sequence(ids, len(ids), [token], slot=1))
        ids.append(token)
        drafts = ranks.draft(DraftStep(1, len(ids) - 1, following))
        assert_same_bits(logits[0], expected["logits"][i], f"logits of step {i}")
        assert_same_bits(drafts.ids[0], expected["draft_ids"][i, 1:], f"draft_ids {i}")
        assert_same_bits(drafts.logits[0], expected["draft_logits"][i], f"draft_logits {i}")
        assert_same_bits(drafts.confidence[0], expected["confidence"][i], f"confidence {i}")


@pytest.mark.parametrize("count", (5, 17, 64))
def test_prefill_through_the_reference_gives_every_golden_bit(traced, count):
    assert_prefill(*traced, count)


def test_decode_and_drafts_through_the_reference_give_every_golden_bit(traced):
    assert_decode(traced[0], 17)


def test_three_ranks_through_the_reference_give_every_golden_bit(monkeypatch):
    trace = DeviceTrace(3)
    with local_ranks(monkeypatch, TorchBackend(), recipe(3), observers=trace.observers) as ranks:
        assert_prefill(ranks, trace, 17)


def test_windows_and_pages_of_the_reference_can_be_taken_out_and_put_back(traced):
    ranks, _ = traced
    (model,) = ranks.models
    ids = golden("prefill_17")["input_ids"].tolist()
    ranks.prefill(ids, slot=2)
    number = ranks.sequence(ids, 17, [3], slot=2).pages[0]
    window, page = model.export_window(2), model.read_page(number)
    before = ranks.step(ranks.sequence(ids, 17, [3], slot=2))[0]
    ranks.prefill(ids[::-1] * 2, slot=2)
    assert not (model.export_window(2) == window or model.read_page(number) == page)
    model.import_window(2, window)
    model.write_page(number, page)
    assert model.export_window(2) == window
    assert model.read_page(number) == page
    assert_same_bits(ranks.step(ranks.sequence(ids, 17, [3], slot=2))[0], before, "logits")


# Ranks over torch.distributed, and streams ------------------------------------------------------


@pytest.mark.parametrize("backend", (NATIVE, TorchBackend()), ids=("native", "reference"))
def test_two_ranks_over_gloo_give_every_golden_bit(monkeypatch, backend):
    trace = DeviceTrace(2)
    chosen, groups = recipe(2), gloo_groups(2)
    with local_ranks(monkeypatch, backend, chosen, groups, observers=trace.observers) as ranks:
        assert_prefill(ranks, trace, 17)
        assert_decode(ranks, 17, steps=2)


class StreamedBackend(TorchBackend):
    """Streams as on CUDA, whose stand-ins run everything at once."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = CudaStreams(torch.device("cuda", 0))


def test_ops_issued_on_streams_give_every_golden_bit(monkeypatch):
    FakeCuda(monkeypatch)
    trace, groups = DeviceTrace(2), gloo_groups(2)
    backend = StreamedBackend()
    with local_ranks(monkeypatch, backend, recipe(2), groups, observers=trace.observers) as ranks:
        assert_prefill(ranks, trace, 17)


# float32 accumulation ---------------------------------------------------------------------------


def layer_errors(patch, backend, chosen, count: int) -> dict[str, float]:
    expected = golden(f"prefill_{count}")
    layers = Layerwise(expected)
    with local_ranks(patch, backend, chosen, observers=[layers.observe]) as ranks:
        ranks.prefill(expected["input_ids"].tolist())
    assert len(layers.errors) > 20
    return layers.errors


def test_float32_accumulation_is_close_layer_by_layer(monkeypatch):
    backend, chosen = TorchBackend("cpu", "float32"), recipe(1, "float32")
    errors = layer_errors(monkeypatch, backend, chosen, 64)
    worst = max(errors, key=errors.get)
    assert 0 < errors[worst] < LAYER_ERROR_MAX, f"{worst}: {errors[worst]:.2e}"


def test_float64_accumulation_has_no_error_layer_by_layer(monkeypatch):
    assert not any(layer_errors(monkeypatch, TorchBackend(), recipe(1), 17).values())


def test_an_error_of_a_layer_is_found_layer_by_layer(monkeypatch):
    monkeypatch.setattr(attention.math, "sqrt", lambda width: width**0.45)
    errors = layer_errors(monkeypatch, TorchBackend(), recipe(1), 17)
    assert min(errors[f"attn_out.{layer}"] for layer in range(8)) > LAYER_ERROR_MAX


def test_the_accumulation_is_part_of_the_identity_and_of_what_a_rank_runs(monkeypatch):
    narrow = recipe(1, "float32")
    wide = replace(narrow, accumulation="float64")
    assert narrow.identity["accumulation"] == "float32" and narrow.digest != wide.digest
    with pytest.raises(AssertionError, match="kernels add up in float64, the recipe in float32"):
        local_ranks(monkeypatch, TorchBackend(), narrow)


# CUDA -------------------------------------------------------------------------------------------


def bits_of_goldens(ranks, trace) -> tuple[int, int, int]:
    """Tensors of all prefills, those without a wrong bit, and elements that differ."""
    tensors, equal, differing = 0, 0, 0
    for count in LENGTHS:
        expected = golden(f"prefill_{count}")
        logits = ranks.prefill(expected.pop("input_ids").tolist())
        del expected["logits"]
        for key, value in expected.items():
            found = logits if key == "logits_all" else found_in_trace(key, trace, ranks, count)
            wrong = int(np.sum(found != value))
            tensors, equal, differing = tensors + 1, equal + (wrong == 0), differing + wrong
    return tensors, equal, differing


def speeds(ranks) -> tuple[float, float]:
    """Tokens a second of a prefill of 300 and of a decode at batch 1, both warm."""
    ids = golden("prefill_300")["input_ids"].tolist()
    ranks.prefill(ids)
    begin = time.perf_counter()
    ranks.prefill(ids)
    middle = time.perf_counter()
    for i in range(20):
        ranks.step(ranks.sequence(ids + [3] * i, len(ids) + i, [3]))
    return len(ids) / (middle - begin), 20 / (time.perf_counter() - middle)


@pytest.mark.cuda
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_goldens_on_cuda(monkeypatch, accumulation, capsys):
    chosen, trace = replace(recipe(1, accumulation), device="cuda"), DeviceTrace(1)
    backend = cuda_backend(accumulation)
    with local_ranks(monkeypatch, backend, chosen, observers=trace.observers) as ranks:
        tensors, equal, differing = bits_of_goldens(ranks, trace)
    errors = layer_errors(monkeypatch, backend, chosen, 64)
    with local_ranks(monkeypatch, backend, chosen) as ranks:
        prefill, decode = speeds(ranks)
        if accumulation == "float64":
            assert_decode(ranks, 17)
    name, memory = torch.cuda.get_device_name(0), device_memory(0)
    lines = (
        f"{name}, {accumulation}: {equal} of {tensors} golden tensors equal, {differing} elements",
        f"differ; worst layer {max(errors.values()):.2e}; prefill {prefill:.0f} tok/s, decode",
        f"{decode:.1f} tok/s; {memory.available_bytes / GIB:.1f} GiB left ({memory.source})",
    )
    with capsys.disabled():
        print("\n" + " ".join(lines))
    assert max(errors.values()) < LAYER_ERROR_MAX
    if accumulation == "float64":
        assert equal == tensors, f"{differing} elements differ"
