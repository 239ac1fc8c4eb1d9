"""No way of running a sequence moves a bit of its logits, and each comparison can turn red."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat

import numpy as np
import pytest

from engine import core as core_module
from engine.executor import NativeBackend
from engine.ops import rows as rows_module
from engine.recipe import Recipe
from fixtures.local_ranks import LocalRanks
from tests.engine.runs import (
    MINI,
    assert_same_bits,
    draft_bits,
    in_pieces,
    interleaved,
    some_ids,
    states_of,
)

IDS = some_ids(1, 82)
"""Longer than the window, the selection and the candidates, over five pages and a part of one."""
OTHERS = [some_ids(seed, count) for seed, count in ((2, 61), (3, 17), (4, 5), (5, 34))]
PAGE_TOKENS = 16
DRAFTS = 5
POSITIONS = (30, 80)
"""Where drafts are asked for."""


def recipe(ranks: int = 1, **more) -> Recipe:
    values = {"max_concurrency": 5, "mtp_draft_tokens": DRAFTS, "prefill_chunk": 128}
    return Recipe(ranks=ranks, kv_page_tokens=PAGE_TOKENS, **{**values, **more})


@pytest.fixture(scope="module")
def opened():
    """Models by recipe and threads, kept open for the whole module."""
    kept: dict = {}

    def get(ranks: int = 1, threads: int = 1, **more) -> LocalRanks:
        key = recipe(ranks, **more), threads
        if key not in kept:
            kept[key] = LocalRanks(MINI, key[0], threads=threads)
        return kept[key]

    yield get
    for model in kept.values():
        model.close()


@pytest.fixture(scope="module")
def clean(opened):
    """Logits of the sequence run whole on one rank, and its drafts at some positions."""
    ranks = opened()
    logits = in_pieces(ranks, IDS, [len(IDS)])
    return logits, drafts_on_the_way(ranks)


@pytest.fixture(scope="module")
def others(opened):
    """Logits of the other sequences, each run alone and whole."""
    return [in_pieces(opened(), ids, [len(ids)]) for ids in OTHERS]


def drafts_on_the_way(ranks: LocalRanks, slot: int = 0) -> list[bytes]:
    found, at = [], 0
    for position in POSITIONS:
        in_pieces(ranks, IDS[: position + 1], [position + 1 - at], start=at, slot=slot)
        found.append(draft_bits(ranks, IDS, position, slot))
        at = position + 1
    return found


def test_the_sequence_exceeds_every_width_that_selects(opened):
    config = opened().config
    assert config.sliding_window + DRAFTS < len(IDS) // 3
    assert config.index_topk < len(IDS) // 2 // 2
    assert config.candidate_topk_blocks * config.candidate_block_size < len(IDS) // 2
    assert len(IDS) // PAGE_TOKENS == 5 and len(IDS) % PAGE_TOKENS and len(IDS) % 2 == 0


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_number_of_ranks_gives_the_bits_of_one(opened, clean, ranks):
    model = opened(ranks)
    assert_same_bits(in_pieces(model, IDS, [len(IDS)]), clean[0])
    assert drafts_on_the_way(model) == clean[1]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 64])
def test_every_chunk_gives_the_bits_of_the_whole(opened, clean, ranks, chunk):
    assert_same_bits(in_pieces(opened(ranks), IDS, repeat(chunk)), clean[0])


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("chunk", [2, 3, 5])
def test_chunks_smaller_than_the_ranks_run_as_prompts_too(opened, clean, ranks, chunk):
    # Without drafts a step of more than one id is a prompt's, some ranks have no row of it.
    model = opened(ranks, mtp_draft_tokens=0)
    assert_same_bits(in_pieces(model, IDS[:30], repeat(chunk)), clean[0][:30])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("last", range(1, 9))
def test_a_short_last_chunk_gives_the_bits_of_the_whole(opened, clean, ranks, last):
    ids = IDS[: 40 + last]
    assert_same_bits(in_pieces(opened(ranks), ids, [40, last]), clean[0][: len(ids)])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("seed", [1, 2])
def test_neighbours_in_a_step_leave_no_trace(opened, clean, others, ranks, seed):
    slots = np.random.default_rng(seed).permutation(5).tolist()
    found = interleaved(opened(ranks), [IDS, *OTHERS], slots, seed)
    for number, expected in enumerate([clean[0], *others]):
        assert_same_bits(found[number], expected, f"sequence {number} in slot {slots[number]}")


@pytest.mark.parametrize("scratch", ["none", "pools"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_scratch_strategy_gives_the_bits_of_planned(opened, clean, ranks, scratch):
    model = opened(ranks, scratch=scratch)
    assert_same_bits(in_pieces(model, IDS, [len(IDS)]), clean[0])
    assert drafts_on_the_way(model) == clean[1]


@pytest.fixture
def counted_parts(monkeypatch):
    """Every op is worth a thread, however few its rows; counts the parts that were made."""
    made = []
    parts = rows_module.Workers.parts

    def noted(workers, rows, least):
        found = parts(workers, rows, least)
        made.append(len(found))
        return found

    monkeypatch.setattr(rows_module, "WORTH_ITEMS", 1)
    monkeypatch.setattr(rows_module.Workers, "parts", noted)
    return made


@pytest.mark.parametrize(("ranks", "threads"), [(1, 2), (1, 7), (1, 100), (2, 2)])
def test_any_number_of_threads_gives_the_bits_of_one(clean, counted_parts, ranks, threads):
    with LocalRanks(MINI, recipe(ranks), threads=threads) as model:
        assert_same_bits(in_pieces(model, IDS, [18, 17, 64]), clean[0])
        assert drafts_on_the_way(model) == clean[1]
    assert max(counted_parts) == min(threads, 64)


def test_a_step_with_fewer_rows_than_threads_runs(opened, clean):
    limits = {"max_concurrency": 3, "prefill_chunk": 17}
    with LocalRanks(MINI, recipe(**limits), threads=20) as model:
        assert_same_bits(in_pieces(model, IDS[:51], repeat(17)), clean[0][:51])


@pytest.mark.parametrize("ranks", [1, 3])
def test_used_slots_and_pages_are_as_good_as_fresh_ones(opened, clean, others, ranks):
    model = opened(ranks)
    for ids, expected in zip(OTHERS, others, strict=True):
        assert_same_bits(in_pieces(model, ids, [len(ids)], slot=2), expected)
    assert_same_bits(in_pieces(model, IDS, [50, 32], slot=2), clean[0])
    assert_same_bits(in_pieces(model, IDS, [50, 32], slot=2), clean[0], "the replay")
    assert drafts_on_the_way(model, slot=2) == clean[1]


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_lies_in_unused_memory_does_not_matter(clean, ranks):
    def fill(model) -> None:
        draw = np.random.default_rng(7)
        for arena in model.executor.arenas.values():
            arena[...] = 0xFF
        for name in states_named(model):
            array = model.persistent[name]
            array[...] = draw.integers(0, 256, array.shape, np.uint8)

    with LocalRanks(MINI, recipe(ranks), change=fill) as model:
        assert_same_bits(in_pieces(model, IDS, [33, 49]), clean[0])
        assert drafts_on_the_way(model) == clean[1]


def states_named(model) -> set[str]:
    return {tensor.name for graph in model.graphs.values() for tensor in graph.of_kind("state")}


@pytest.mark.parametrize("pages", [(63, 0, 7, 31, 2, 5), (5, 4, 3, 2, 1, 0)])
def test_pages_in_any_order_give_the_same_bits(opened, clean, pages):
    assert_same_bits(in_pieces(opened(), IDS, [7, 70, 3], pages=pages), clean[0])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("seed", [1, 2])
def test_rejected_drafts_leave_no_trace(opened, clean, ranks, seed):
    """Steps of 1 + 5 ids of which a random number is right; the others are simply overwritten."""
    model, draw = opened(ranks), np.random.default_rng(seed)
    at, drafts = 25, {}
    in_pieces(model, IDS[:at], [at])
    wanted = dict(zip(POSITIONS, clean[1], strict=True))
    while at < len(IDS):
        right = IDS[at : at + 1 + int(draw.integers(0, DRAFTS + 1))]
        if over := [p for p in POSITIONS if at <= p < at + len(right)]:
            right = IDS[at : over[0] + 1]
        wrong = [(IDS[(at + k) % len(IDS)] + 1 + k) % 512 for k in range(1 + DRAFTS - len(right))]
        (logits,) = model.step(model.sequence(IDS, at, (*right, *wrong)))
        assert_same_bits(logits[: len(right)], clean[0][at : at + len(right)], f"from {at}")
        at += len(right)
        if at - 1 in wanted:
            drafts[at - 1] = draft_bits(model, IDS, at - 1)
    assert drafts == wanted


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("cut", [16, 48, 64])
def test_a_restored_prefix_gives_the_bits_of_a_cold_run(opened, clean, ranks, cut):
    model = opened(ranks)
    found = after_restoring(model, *exported_prefix(model, cut), cut)
    assert_same_bits(found, clean[0][cut:])
    assert draft_bits(model, IDS, POSITIONS[1], slot=3) == clean[1][1]


def exported_prefix(model: LocalRanks, cut: int) -> tuple[bytes, list[bytes]]:
    in_pieces(model, IDS[:cut], [cut], slot=1)
    pages = [model.core.export_page(page) for page in model.own_pages(1, cut)]
    return model.core.export_window(1), pages


def after_restoring(
    model: LocalRanks, window: bytes, pages: list[bytes], cut: int
) -> np.ndarray:
    """Logits behind a prefix restored to a slot and to pages where another sequence has been."""
    table = (40, 41, 20, 21, 50, 51)
    in_pieces(model, some_ids(9, 64), [64], slot=3, pages=table)
    model.core.import_window(3, window)
    for page, content in zip(table, pages, strict=False):
        model.core.import_page(page, content)
    return in_pieces(model, IDS, [9, 40], start=cut, slot=3, pages=table)


@pytest.mark.parametrize("ranks", [1, 3])
def test_replicated_states_are_equal_on_every_rank(opened, ranks):
    model = opened(ranks)
    in_pieces(model, IDS, [30, 1, 51])
    first, *rest = states_of(model)
    assert len(first) == 1 + 8 + 3 + 1, sorted(first)
    assert any(first["kv_pool"]) and all(any(content) for content in first.values())
    for other in rest:
        assert other == first


# Every comparison above can turn red --------------------------------------------------------------


class Leaving(NativeBackend):
    """Kernels, but one kind of op does nothing."""

    def __init__(self, kind: str) -> None:
        self.binders = {**NativeBackend.binders, kind: lambda binding, op: lambda: None}


@pytest.mark.parametrize("kind", ["write_ring", "write_tail", "write_entries"])
def test_a_cache_that_is_not_written_shows_at_the_next_chunk(clean, kind):
    def plant(model) -> None:
        model.executor.backend = Leaving(kind)

    with LocalRanks(MINI, recipe(), change=plant) as model:
        first, second = in_pieces(model, IDS, [33, 49])[:33], in_pieces(model, IDS, [33, 49])[33:]
    if kind != "write_entries":
        assert_same_bits(first, clean[0][:33])
    assert (second != clean[0][33:]).mean() > 0.5


class Flipped:
    """A communicator that flips one bit of one message."""

    def __init__(self, inner, message: int) -> None:
        self.rank, self.ranks, self._inner, self._left = inner.rank, inner.ranks, inner, message

    def all_gather(self, received, sent):
        return self._spoiled(self._inner.all_gather(received, sent), received)

    def all_to_all(self, received, sent, received_sizes, sent_sizes):
        exchange = self._inner.all_to_all(received, sent, received_sizes, sent_sizes)
        return self._spoiled(exchange, received)

    def _spoiled(self, exchange, received):
        exchange.wait()
        self._left -= 1
        if self._left == 0:
            received[-1] ^= 0x01
        return self

    def wait(self) -> None:
        pass


def test_one_wrong_bit_between_ranks_is_seen(clean):
    def plant(model) -> None:
        if model.executor.comm.rank == 0:
            # The second message of a prompt ends with the other rank's window rows of layer 0.
            model.executor.comm = Flipped(model.executor.comm, 2)

    with LocalRanks(MINI, recipe(2), change=plant) as model:
        found = in_pieces(model, IDS[:16], [16])
        assert (found != clean[0][:16]).any()
        first, second = states_of(model)
        assert first != second


def test_one_wrong_weight_byte_on_one_rank_is_seen(clean):
    def plant(model) -> None:
        if model.executor.comm.rank == 2:
            model.persistent["layers.4.attn.wo_b.weight"][0] ^= 0x10

    with LocalRanks(MINI, recipe(3), change=plant) as model:
        assert (in_pieces(model, IDS, [len(IDS)]) != clean[0]).any()


def test_a_neighbours_slot_is_seen(monkeypatch, opened, clean):
    step_batch = core_module.step_batch

    def in_slot_two(graph, steps, config, fold):
        return step_batch(graph, [replace(step, slot=2) for step in steps], config, fold)

    monkeypatch.setattr(core_module, "step_batch", in_slot_two)
    found = interleaved(opened(), [IDS, *OTHERS], range(5), 1)
    assert (found[0] != clean[0]).any()


def test_a_lost_history_is_seen(opened, clean):
    in_pieces(opened(), IDS[:40], [40])
    step = opened().sequence(IDS, 40, IDS[40:50])
    (found,) = opened().step(replace(step, history=(0,) * 40))
    assert (found != clean[0][40:50]).any()


def test_a_rejected_id_taken_for_accepted_is_seen(opened, clean):
    in_pieces(opened(), IDS[:40], [40])
    (found,) = opened().step(opened().sequence(IDS, 40, (IDS[40], 511, IDS[42])))
    assert_same_bits(found[0], clean[0][40])
    assert (found[2] != clean[0][42]).any()


@pytest.mark.parametrize("cut", [48, 64])
def test_one_wrong_byte_of_a_restored_prefix_is_seen(opened, clean, cut):
    window, pages = exported_prefix(opened(), cut)
    rings = opened().models[0].persistent["layers.0.ring"].nbytes // 5
    spoiled = bytearray(window)
    spoiled[rings - 70] ^= 0x44
    assert (after_restoring(opened(), bytes(spoiled), pages, cut) != clean[0][cut:]).any()
    # The newest entry of the candidates' source: its block is always kept.
    spoiled = bytearray(pages[-1])
    spoiled[-10] ^= 0x44
    wrong = [*pages[:-1], bytes(spoiled)]
    assert (after_restoring(opened(), window, wrong, cut) != clean[0][cut:]).any()
