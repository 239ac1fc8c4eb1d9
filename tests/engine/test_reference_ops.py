"""Every op kind gives the same bits through the compiled kernels and through the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.config import parse_config
from engine.exchange import TRANSFERS
from engine.executor import NATIVE
from engine.formats import bf16_bits, bf16_values
from engine.model import build_graphs
from engine.ops import reference, table
from engine.ops.reference import attention, numbers
from engine.ops.reference.backend import TorchBackend
from engine.ops.reference.table import BINDERS
from engine.recipe import Recipe
from engine.shard import deal_ranks
from fixtures.checkpoints.mini_configs import other_config
from tests.engine import op_cases_attention, op_cases_dense, op_cases_experts
from tests.engine.op_bench import CONFIG, REFERENCE, Bench

CASES = [*op_cases_dense.CASES, *op_cases_attention.CASES, *op_cases_experts.CASES]


@pytest.fixture(autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def case_named(part: str):
    (case,) = (case for case in CASES if part in case.name)
    return case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_tables_leave_equal_bytes(case):
    case.build().compare()


@pytest.mark.parametrize("ranks", (1, 3))
@pytest.mark.parametrize("config", (CONFIG, parse_config(other_config())), ids=("mini", "other"))
def test_every_op_kind_of_every_graph_is_in_both_tables(config, ranks):
    recipe = Recipe(ranks=ranks, prefill_chunk=64, max_concurrency=2)
    deals = deal_ranks(config, recipe)
    graphs = (graph for r in range(ranks) for graph in build_graphs(config, recipe, deals, r))
    kinds = {op.kind for graph in graphs for op in graph.ops}
    assert kinds - set(TRANSFERS) == set(table.BINDERS) == set(BINDERS)


def test_every_op_kind_is_compared():
    assert {case.kind for case in CASES} == set(BINDERS)


def test_no_reference_kernel_is_compiled():
    for kind, binder in BINDERS.items():
        assert binder.__module__.startswith(reference.__name__), f"{kind} is {binder}"
    for path in Path(reference.__file__).parent.glob("*.py"):
        assert "numba" not in path.read_text(), path.name


class OneBitOff(TorchBackend):
    """Kernels that turn over the last bit of what they leave last."""

    @property
    def binders(self):
        return {kind: self._off(binder) for kind, binder in BINDERS.items()}

    def _off(self, binder):
        def bind(b, op):
            run, (last,) = binder(b, op), b.arrays(op.outputs[-1:])

            def go() -> None:
                run()
                last.reshape(-1)[-1:].view(torch.uint8)[-1:] ^= 1

            return go

        return bind


@pytest.mark.parametrize("kind", BINDERS)
def test_one_wrong_bit_is_found_in_every_kind_of_op(kind):
    case = next(c for c in CASES if c.kind == kind and c.build().run(REFERENCE)[_last(c)].size)
    with pytest.raises(AssertionError, match=": 1 of .* bytes differ"):
        case.build().compare(OneBitOff())


def _last(case) -> str:
    graph = case.build().low.b.graph()
    return graph.root(graph.ops[0].outputs[-1])


def cut_off(x: torch.Tensor) -> torch.Tensor:
    bits = x.to(torch.float32).view(torch.int32) >> 16 << 16
    return bits.view(torch.float32).to(torch.bfloat16)


def rounded_at_once(x: torch.Tensor) -> torch.Tensor:
    """float64 to the nearest bf16, ties to even, without float32 in between."""
    bits = x.view(torch.int64)
    rounded = bits + (2**44 - 1) + (bits >> 45 & 1) >> 45 << 45
    return rounded.view(torch.float64).to(torch.bfloat16)


def scale_below(values: torch.Tensor) -> torch.Tensor:
    return (values.view(torch.int32) >> 23).to(torch.uint8)


FAULTS = {
    "norm-rows_with_a_zero_row-5": ("round_bf16", cut_off),
    "sums_that_round_twice": ("round_bf16", rounded_at_once),
    "pack_fp8-every_bf16_value": ("pow2_ceil", scale_below),
}


@pytest.mark.parametrize("part", FAULTS)
def test_another_rounding_is_found(part, monkeypatch):
    name, fault = FAULTS[part]
    monkeypatch.setattr(numbers, name, fault)
    with pytest.raises(AssertionError, match="bytes differ"):
        case_named(part).build().compare()


# Numbers ----------------------------------------------------------------------------------------


def finite_bf16(rows: int, width: int, below: float = 3.0e38):
    """Bit patterns of bf16 values of any size below a bound."""
    past = int(bf16_bits(below))
    code = st.integers(0, past - 1) | st.integers(0x8000, 0x8000 + past - 1)
    return hnp.arrays(np.uint16, (rows, width), elements=code)


@settings(max_examples=30, deadline=None)
@given(rows=finite_bf16(3, 40))
def test_fp8_round_trip_is_equal_for_any_finite_rows(rows):
    bench = Bench(0, 3)
    bench.op("pack_fp8", (bench.given("x", rows),), (bench.out("out", "u8", 3, 42),)).compare()


@settings(max_examples=30, deadline=None)
@given(rows=finite_bf16(3, 64))
def test_fp4_queries_are_equal_for_any_finite_rows(rows):
    bench = Bench(0, 3)
    out = bench.out("out", "u8", 3, 34)
    bench.op("pack_fp4", (bench.given("x", rows),), (out,), width=64).compare()


@settings(max_examples=30, deadline=None)
@given(latent=finite_bf16(3, 32, below=2600.0), key=finite_bf16(3, 32))
def test_cache_entries_are_equal_for_rows_whose_scales_fit(latent, key):
    """A scale is E4M3, so a latent of more than 6 x 448 has none; normed latents stay far below."""
    bench = Bench(0, 3)
    inputs = bench.given("latent", latent), bench.given("key", key)
    bench.op("pack_entries", inputs, (bench.out("out", "u8", 3, 16 + 2 + 17),)).compare()


def test_float64_rounds_to_bf16_by_way_of_float32():
    found = case_named("sums_that_round_twice").build().compare()["out"].view(np.uint16)
    # One rounding would go up from 1 + 2^-8 + 2^-40 to 1 + 2^-7.
    assert bf16_values(found)[0] == 1


def test_nan_has_one_pattern_of_bits_whatever_the_length():
    for size in (1, 3, 64):
        rounded = numbers.round_bf16(torch.full((size,), torch.nan, dtype=torch.float64))
        assert rounded.view(torch.int16).tolist() == [0x7FC0] * size


def test_a_row_that_reaches_no_key_gives_zeros_whatever_the_keys_hold():
    query = torch.ones(2, 3, 8, dtype=torch.float64)
    keys = torch.full((2, 5, 8), torch.nan, dtype=torch.float64)
    found = attention.attention(torch.float64, query, keys, keys[..., 0] > 0, torch.zeros(3))
    assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("rows", (9, 0))
@pytest.mark.parametrize("into", ("bf16", "f64"))
def test_partial_sums_of_ranks_are_equal(into, rows):
    bench = Bench(1, max(rows, 1))
    octaves = 2.0 ** bench.rng.integers(-9, 9, (3, rows, 40))
    parts, sums = bench.rng.standard_normal((3, rows, 40)) * octaves, []
    part = bench.given("part", parts[0] if rows else np.zeros((0, 40)))
    bench.op("reduce", (part,), (bench.out("out", into, rows, 40),))
    for backend in (NATIVE, REFERENCE):
        op, binding = bench.bind(backend)
        out = binding.array("out")
        values = parts if backend is NATIVE else torch.from_numpy(parts)
        backend.bind_add(binding, op)(values, out)
        sums.append(backend.host(out).tobytes())
    assert sums[0] == sums[1]


def test_float32_accumulation_rounds_where_float64_does_not():
    bench, wide = case_named("linear-bf16_rows_and_bf16_weight-40").build(), {}
    for accumulation in ("float64", "float32"):
        wide[accumulation] = bench.run(TorchBackend("cpu", accumulation))["op"].view(np.float32)
    differing = np.mean(wide["float64"] != wide["float32"])
    assert 0.01 < differing < 1
    np.testing.assert_allclose(wide["float32"], wide["float64"], rtol=1e-3, atol=1e-4)
