"""The tensor list of a configuration, its byte figures, and what becomes of each name."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest

from engine.config import parse_config, read_config
from engine.errors import CheckpointError
from engine.recipe import Recipe
from engine.shard import ITEM_BYTES, deal_ranks, rank_weights
from engine.tensors import (
    IMAGE_BIAS,
    NO_DRAFTS,
    TEXT_ONLY,
    TensorSpec,
    account_for,
    expected_tensors,
    optional_tensors,
)
from engine.units import GIB
from fixtures.checkpoints.mini_configs import OTHER_TEXT, mini_config
from tests.engine.mini_files import GOLDEN, INDEX, SHARDS, read_file

RELEASE = dict(
    vocab_size=129280, hidden_size=5120, moe_intermediate_size=2304, num_hidden_layers=40,
    num_attention_heads=64, head_dim=512, qk_rope_head_dim=64, q_lora_rank=1280, o_lora_rank=1024,
    o_groups=8, n_routed_experts=384, num_experts_per_tok=6, sliding_window=128,
    compress_ratios=[0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0], kv_source_layer_ids=[2, 8, 14, 20],
    index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 36], index_n_heads=32, index_head_dim=128,
    index_topk=512, candidate_source_layer_id=20, candidate_topk_blocks=2048,
    candidate_block_size=8, engram_layer_ids=[1, 14],
    engram_num_embeddings=[384006168, 384016682], engram_vocab_size=16000000, engram_n_heads=8,
    engram_head_dim=256, engram_compressed_vocab_size=99092, dspark_noise_token_id=128799,
    dspark_target_layer_ids=[37, 38, 39], dspark_markov_rank=256, dspark_n_routed_experts=128,
    dspark_num_experts_per_tok=3,
)  # fmt: skip

OTHER = OTHER_TEXT | {"o_lora_rank": 32}


@pytest.fixture(scope="module")
def release():
    document = mini_config()
    document["text_config"] |= RELEASE
    return parse_config(document)


@pytest.fixture(scope="module")
def mini():
    return read_config(GOLDEN)


def nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * ITEM_BYTES[spec.dtype]


def part(name: str) -> str:
    """The line of the published byte table that a tensor belongs to."""
    if ".experts." in name:
        return "routed experts"
    if name.startswith("mtp."):
        return "DSpark other"
    if ".engram." in name:
        return "Engram"
    if ".attn." in name:
        return "attention"
    if "shared_experts" in name:
        return "shared experts"
    return "embed+head" if name in ("embed.weight", "head.weight") else "norms, gates and mixes"


def test_release_bytes_match_the_published_table(release):
    totals = Counter()
    for name, spec in expected_tensors(release).items():
        totals[part(name)] += nbytes(spec)
    assert {name: round(size / GIB, 2) for name, size in totals.items()} == {
        "routed experts": 275.67,
        "Engram": 189.13,
        "attention": 4.80,
        "embed+head": 2.47,
        "shared experts": 1.32,
        "DSpark other": 0.66,
        "norms, gates and mixes": 0.29,
    }


def test_one_release_expert_weighs_what_the_publisher_says(release):
    specs = expected_tensors(release)
    one = [s for name, s in specs.items() if name.startswith("layers.7.ffn.experts.3.")]
    assert len(one) == 6
    assert sum(map(nbytes, one)) == 18_800_640


def test_release_counts_leave_the_published_vision_part(release):
    text = {**expected_tensors(release), **optional_tensors(release)}
    assert 96_085 - len(text) == 266
    vision_bytes = 510_286_023_000 - sum(map(nbytes, text.values()))
    assert round(vision_bytes / GIB, 2) == 0.90


def test_golden_checkpoint_holds_exactly_the_expected_tensors(mini):
    found = {}
    for shard in SHARDS:
        for name, (dtype, shape, _) in read_file(GOLDEN / shard).items():
            found[name] = TensorSpec(dtype, tuple(shape))
    assert found == expected_tensors(mini)
    index = json.loads((GOLDEN / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(map(nbytes, found.values()))


def test_scale_grids_are_rounded_up():
    config = parse_config(mini_config(o_lora_rank=32, o_groups=1, index_n_heads=1))
    specs = expected_tensors(config)
    for name, spec in specs.items():
        weight = specs.get(name.replace(".scale", ".weight"))
        if name.endswith(".scale") and ".experts." not in name and ".embed." not in name:
            assert spec.shape == tuple(-(-items // 32) for items in weight.shape), name


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("shape", ["mini", "other"])
def test_ranks_read_every_used_tensor_and_cover_it(ranks, shape):
    config = parse_config(mini_config(**(OTHER if shape == "other" else {})))
    for drafts in (0, 7):
        recipe = Recipe(ranks=ranks, mtp_draft_tokens=drafts)
        specs = expected_tensors(config)
        used = account_for(specs, config, drafts).used
        readers = {name: np.zeros(specs[name].shape, np.int8) for name in used}
        for deal in deal_ranks(config, recipe):
            for weight in rank_weights(config, recipe, deal):
                for piece in weight.pieces:
                    spec = specs[piece.source]
                    assert spec.dtype == weight.dtype, piece
                    readers[piece.source][_index(piece, spec)] += 1
        for name, count in readers.items():
            # Cut tensors are read once, whole ones by every rank; nothing lies between, except
            # that both sides of a cut inside an FP8 block need its scale.
            assert count.min() in (1, ranks), name
            assert count.max() == count.min() or (name.endswith(".scale") and shape == "other")


def _index(piece, spec: TensorSpec) -> tuple[slice, ...]:
    ranges = (piece.rows, piece.columns)[: len(spec.shape)]
    return tuple(slice(*r) if r else slice(None) for r in ranges)


def test_image_tensors_are_left_out_with_the_reason(mini):
    extra = ["vision.blocks.0.attn.qkv.weight", "aligner.proj.weight", "image_newline"]
    bias = "layers.3.ffn.gate.bias_vl"
    ledger = account_for([*expected_tensors(mini), *extra, bias], mini, draft_tokens=7)
    assert ledger.left_out == {**dict.fromkeys(extra, TEXT_ONLY), bias: IMAGE_BIAS}
    assert ledger.used == frozenset(expected_tensors(mini))


def test_draft_blocks_are_left_out_when_there_are_no_drafts(mini):
    ledger = account_for(expected_tensors(mini), mini, draft_tokens=0)
    assert set(ledger.left_out.values()) == {NO_DRAFTS}
    assert all(name.startswith("mtp.") for name in ledger.left_out)
    assert not any(name.startswith("mtp.") for name in ledger.used)


def test_summary_counts_every_left_out_tensor(mini):
    ledger = account_for(
        [*expected_tensors(mini), "vision.blocks.0.w", "vision.blocks.1.w"], mini, draft_tokens=0
    )
    assert {"reason": TEXT_ONLY, "names": "vision.blocks.*.w", "count": 2} in ledger.summary
    assert sum(line["count"] for line in ledger.summary) == len(ledger.left_out)


@pytest.mark.parametrize(
    "name",
    ["layers.8.attn_norm.weight", "mtp.3.attn_norm.weight", "layers.0.attn.compressor.wkv.weight",
     "layers.5.attn.compressor.wgate.weight", "layers.2.ffn.experts.12.w1.weight", "lm_head.weight",
     "model.embed.weight", "layers.8.ffn.gate.bias_vl", "my_vision.x"],
)  # fmt: skip
def test_unknown_tensor_is_refused_by_name(mini, name):
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        account_for([*expected_tensors(mini), name], mini, draft_tokens=7)


@pytest.mark.parametrize(
    "name", ["head.weight", "layers.1.engram.embed.scale", "mtp.2.confidence_head.proj.weight"]
)
@pytest.mark.parametrize("drafts", [0, 7])
def test_missing_tensor_is_refused_by_name(mini, name, drafts):
    names = [n for n in expected_tensors(mini) if n != name]
    with pytest.raises(CheckpointError, match=f"lacks 1 of .*{name}"):
        account_for(names, mini, drafts)


def test_many_missing_tensors_are_counted(mini):
    names = [n for n in expected_tensors(mini) if ".experts." not in n]
    with pytest.raises(CheckpointError, match=r"lacks \d+ of \d+ tensors: .* and \d+ more"):
        account_for(names, mini, draft_tokens=7)
