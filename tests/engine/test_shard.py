"""Every element of a checkpoint belongs to exactly one rank, or to every rank by rule."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import FP8_BLOCK, ModelConfig, parse_config, read_config
from engine.recipe import Recipe
from engine.shard import (
    Deal,
    Piece,
    Weight,
    _even,
    _level,
    deal_ranks,
    rank_weights,
    resident_bytes,
)
from engine.tensors import expected_tensors
from engine.units import MIB
from fixtures.checkpoints.mini_configs import mini_config, other_config
from tests.engine.any_config import configs

RELEASE = read_config(Path(__file__).parent / "flash-config.json")
MINI = parse_config(mini_config())
OTHER = parse_config(other_config())
SLIM = parse_config(mini_config(o_lora_rank=24, head_dim=48, num_attention_heads=8))
RANKS = range(1, 9)

DEALT = re.compile(
    r"(embed|head|markov_head\.(embed|head)|attn\.wq_b|attn\.wo_[ab]|engram\.(embed|wkv)"
    r"|experts\.\d+\.w[123]|shared_experts\.w[123])\.(weight|scale)|.*attn_sink"
)
"""What ranks share out; all else is on every rank."""

Rect = tuple[int, int, int, int]


def is_dealt(name: str) -> bool:
    """Whether the rule deals a tensor out; `indexer.wq_b` is on every rank."""
    short = re.sub(r"^(layers|mtp)\.\d+\.(ffn\.)?", "", name)
    return DEALT.fullmatch(short) is not None


def rect(piece: Piece, shape: tuple[int, ...]) -> Rect:
    height, width = shape[0], (*shape, 1)[1]
    return *(piece.rows or (0, height)), *(piece.columns or (0, width))


def owners(config: ModelConfig, recipe: Recipe) -> dict[str, list[Rect]]:
    """Per checkpoint tensor the part that each rank takes, in rank order."""
    specs = expected_tensors(config)
    found: dict[str, list[Rect]] = defaultdict(list)
    for deal in deal_ranks(config, recipe):
        for weight in rank_weights(config, recipe, deal):
            for piece in weight.pieces:
                found[piece.source].append(rect(piece, specs[piece.source].shape))
    return found


def partitions(rects: Iterable[Rect], shape: tuple[int, ...]) -> bool:
    """Whether the parts, cut along one axis, cover the tensor once."""
    whole = rect(Piece("", None, None), shape)
    rects = list(rects)
    for axis, other in ((slice(0, 2), slice(2, 4)), (slice(2, 4), slice(0, 2))):
        if all(r[other] == whole[other] for r in rects):
            cuts = [whole[axis][0]]
            for first, past in sorted(r[axis] for r in rects):
                if first != cuts[-1] or past < first:
                    break
                cuts.append(past)
            else:
                return cuts[-1] == whole[axis][1]
    return False


def assert_owned_once(config: ModelConfig, recipe: Recipe) -> None:
    found = owners(config, recipe)
    specs = expected_tensors(config)
    assert set(found) == set(specs), "a tensor of the checkpoint is in no package"
    for name, spec in specs.items():
        rects, whole = found[name], rect(Piece(name), spec.shape)
        if not is_dealt(name):
            assert rects == [whole] * recipe.ranks, f"{name} is not on every rank"
        elif name.endswith(".scale") and ".experts." not in name and ".embed." not in name:
            weights = found[name.removesuffix("scale") + "weight"]
            assert rects == [in_blocks(r) for r in weights], f"{name} does not fit its weight"
        else:
            assert partitions(rects, spec.shape), f"{name} is not owned once: {rects}"


def in_blocks(r: Rect) -> Rect:
    """The 32 x 32 blocks that a part of a weight touches."""
    first_row, past_row, first_column, past_column = r
    first = first_row // FP8_BLOCK, first_column // FP8_BLOCK
    past = -(-past_row // FP8_BLOCK), -(-past_column // FP8_BLOCK)
    return first[0], past[0], first[1], past[1]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("config", [MINI, OTHER, SLIM], ids=["mini", "other", "slim"])
def test_every_element_is_owned_once_or_is_on_every_rank(config, ranks):
    assert_owned_once(config, Recipe(ranks=ranks))


@pytest.mark.parametrize("ranks", [3, 7])
def test_every_element_of_the_release_is_owned_once_or_is_on_every_rank(ranks):
    assert_owned_once(RELEASE, Recipe(ranks=ranks))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs(), st.integers(1, 8))
def test_every_element_of_any_configuration_is_owned_once(document, ranks):
    if document["text_config"]["candidate_source_layer_id"] is None:
        document["text_config"]["candidate_source_layer_id"] = 0
    assert_owned_once(parse_config(document), Recipe(ranks=ranks))


def test_parts_that_overlap_or_leave_a_gap_are_no_partition():
    assert partitions([(0, 4, 0, 6), (4, 4, 0, 6), (4, 9, 0, 6)], (9, 6))
    assert partitions([(0, 9, 4, 6), (0, 9, 0, 4)], (9, 6))
    assert not partitions([(0, 4, 0, 6), (5, 9, 0, 6)], (9, 6))
    assert not partitions([(0, 5, 0, 6), (4, 9, 0, 6)], (9, 6))
    assert not partitions([(0, 4, 0, 6), (4, 8, 0, 6)], (9, 6))
    assert not partitions([(0, 4, 0, 6), (4, 9, 0, 5)], (9, 6))


def test_a_lost_group_is_seen(monkeypatch):
    """The check is not vacuous: the last rank's last group goes missing."""
    *others, last = deal_ranks(MINI, Recipe(ranks=3))
    short = (*others, replace(last, groups=(last.groups[0], last.groups[1] - 1)))
    monkeypatch.setattr(sys.modules[__name__], "deal_ranks", lambda config, recipe: short)
    with pytest.raises(AssertionError, match="is not owned once"):
        assert_owned_once(MINI, Recipe(ranks=3))


# Without drafts, and what stays on disk -----------------------------------------------------------


def test_without_drafts_nothing_of_the_draft_blocks_is_taken():
    found = owners(MINI, Recipe(mtp_draft_tokens=0))
    left_out = set(expected_tensors(MINI)) - set(found)
    assert left_out and all(name.startswith("mtp.") for name in left_out)
    assert not any(name.startswith("mtp.") for name in found)


@pytest.mark.parametrize("ranks", [1, 3])
def test_only_engram_tables_stay_on_disk(ranks):
    recipe = Recipe(ranks=ranks)
    for deal in deal_ranks(RELEASE, recipe):
        for weight in rank_weights(RELEASE, recipe, deal):
            assert weight.resident != (".engram.embed." in weight.name), weight.name


def test_stacked_experts_stand_in_order():
    deal = Deal(experts=(3, 6))
    weights = {w.name: w for w in rank_weights(MINI, Recipe(), deal)}
    stacked = weights["layers.4.ffn.experts.w2.weight"]
    assert stacked.shape == (3, 256, 64)
    assert [(p.source, p.index) for p in stacked.pieces] == [
        (f"layers.4.ffn.experts.{expert}.w2.weight", slot) for slot, expert in enumerate((3, 4, 5))
    ]


def test_bytes_of_a_weight_follow_from_its_format():
    sizes = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}
    for dtype, item_bytes in sizes.items():
        assert Weight("w", dtype, (3, 5), ()).nbytes == 15 * item_bytes


def test_the_released_weights_add_up_to_the_published_bytes():
    """Spec 7: 510,286,023,000 bytes less vision (0.90 GiB) and the router's vision biases."""
    (deal,) = deal_ranks(RELEASE, Recipe(ranks=1))
    total = sum(w.nbytes for w in rank_weights(RELEASE, Recipe(ranks=1), deal))
    left_out = 510_286_023_000 - total
    assert 0.89 * 2**30 < left_out < 0.91 * 2**30


# Balance ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", range(2, 9))
def test_released_weights_are_level_to_four_mebibytes(ranks):
    recipe = Recipe(ranks=ranks)
    loads = [resident_bytes(RELEASE, recipe, deal) for deal in deal_ranks(RELEASE, recipe)]
    assert max(loads) - min(loads) <= 4 * MIB


def test_three_ranks_of_the_release_deal_groups_uneven_and_the_rest_against_it():
    deals = deal_ranks(RELEASE, Recipe())
    assert [deal.count("groups") for deal in deals] == [3, 3, 2]
    assert [deal.count("experts") for deal in deals] == [128, 128, 128]
    assert [deal.count("shared") for deal in deals] == [24, 24, 24]
    assert [deal.count("buckets") for deal in deals] == [8, 8, 8]
    assert sum(deal.count("engram_rows") for deal in deals) == 5 * 5120 // 32
    light = deals[2]
    assert light.count("draft_experts") > deals[0].count("draft_experts")
    assert sum(deal.count("draft_experts") for deal in deals) == 128
    assert sum(deal.count("vocab") for deal in deals) == 129280


def test_other_bytes_are_levelled_with_the_weights():
    recipe, other = Recipe(), (900 * MIB, 0, 300 * MIB)
    deals = deal_ranks(RELEASE, recipe, other)
    loads = [resident_bytes(RELEASE, recipe, d) + b for d, b in zip(deals, other, strict=True)]
    assert max(loads) - min(loads) <= 4 * MIB


@given(st.integers(0, 200), st.lists(st.integers(0, 1000), min_size=1, max_size=8))
def test_even_shares_differ_by_one_and_the_lightest_get_more(units, loads):
    counts = _even(units, loads)
    assert sum(counts) == units and max(counts) - min(counts) <= 1
    for a, load_a in zip(counts, loads, strict=True):
        assert all(a >= b for b, load_b in zip(counts, loads, strict=True) if load_a < load_b)


@given(
    st.integers(0, 300),
    st.integers(1, 40),
    st.lists(st.integers(0, 3000), min_size=1, max_size=8),
)
def test_levelling_leaves_no_rank_that_could_give_to_a_lighter_one(units, unit_bytes, loads):
    counts = _level(units, unit_bytes, loads)
    assert sum(counts) == units and min(counts) >= 0
    after = [load + count * unit_bytes for load, count in zip(loads, counts, strict=True)]
    heaviest_giver = max((a for a, n in zip(after, counts, strict=True) if n), default=0)
    assert heaviest_giver - unit_bytes <= min(after)


def test_units_without_bytes_are_dealt_evenly():
    assert _level(5, 0, [7, 0, 0]) == _even(5, [7, 0, 0]) == [1, 2, 2]


@pytest.mark.parametrize("ranks", RANKS)
def test_ranges_of_a_part_follow_each_other(ranks):
    deals = deal_ranks(OTHER, Recipe(ranks=ranks))
    for part in Deal.__dataclass_fields__:
        spans = [getattr(deal, part) for deal in deals]
        assert spans[0][0] == 0
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False)), part
    assert [deal.heads(OTHER) for deal in deals] == [
        (deal.groups[0] * 3, deal.groups[1] * 3) for deal in deals
    ]
