"""A configuration is read from the nested document; whatever does not hold is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from engine.config import ModelConfig, parse_config, read_config
from engine.errors import ConfigError
from fixtures.checkpoints.mini_configs import mini_config, other_config

FLASH = Path(__file__).parent / "flash-config.json"


@pytest.fixture(scope="module")
def release() -> ModelConfig:
    return read_config(FLASH)


def flash_document() -> dict:
    return json.loads(FLASH.read_text())


def test_every_key_of_the_release_is_read(release):
    text = flash_document()["text_config"]
    for key, value in text.items():
        if key not in ModelConfig.__dataclass_fields__ or key == "rope_scaling":
            continue
        found = getattr(release, key)
        assert (list(found) if isinstance(found, tuple) else found) == value, key
    scaling = dict(text["rope_scaling"])
    assert scaling.pop("rope_type") == "yarn"
    assert vars(release.rope_scaling) == scaling


def test_values_that_follow_from_the_release(release):
    assert release.num_layers_with_drafts == 43
    assert release.heads_per_group == 8
    assert release.engram_buckets == 24
    assert release.mix_width == 24
    assert release.groups_fill_blocks


def test_layers_of_the_release_read_the_newest_source_before_them(release):
    kv = {2: 2, 7: 2, 8: 8, 13: 8, 14: 14, 19: 14, 20: 20, 39: 20}
    assert {layer: release.kv_source(layer) for layer in kv} == kv
    index = {2: 2, 7: 2, 20: 20, 23: 20, 24: 24, 27: 24, 28: 28, 36: 36, 39: 36}
    assert {layer: release.index_source(layer) for layer in index} == index
    ratios = {0: 0, 1: 0, 2: 2, 19: 2, 20: 1, 39: 1, 40: 0, 42: 0}
    assert {layer: release.ratio(layer) for layer in ratios} == ratios


@pytest.mark.parametrize("document", [flash_document(), mini_config(), other_config()])
def test_a_configuration_survives_its_own_document(document):
    config = parse_config(document)
    assert parse_config(json.loads(json.dumps(config.to_json()))) == config


def test_a_directory_stands_for_its_config(tmp_path, release):
    (tmp_path / "config.json").write_text(FLASH.read_text())
    assert read_config(tmp_path) == release


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_the_kind_of_scaling_may_have_either_name(key):
    document = mini_config()
    scaling = document["text_config"]["rope_scaling"]
    scaling[key] = scaling.pop("rope_type")
    assert parse_config(document) == parse_config(mini_config())


def test_ids_of_special_tokens_come_from_either_level():
    document = mini_config()
    assert parse_config(document).pad_token_id == 2
    document["text_config"]["pad_token_id"] = 9
    assert parse_config(document).pad_token_id == 9
    del document["text_config"]["pad_token_id"], document["pad_token_id"]
    assert parse_config(document).pad_token_id == 2


# Documents that are not one -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[]", "config.json holds list; an object is needed"),
        (b"{}", "model_type is None; accepted: deepseek_v41"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_name(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*config.json: No such"):
        read_config(tmp_path)


def changed(where: tuple[str, ...], value: object) -> dict:
    """The mini document with one value put in, or taken out where it is `DELETED`."""
    document = copy.deepcopy(mini_config())
    inner = document
    for key in where[:-1]:
        inner = inner[key]
    if value is DELETED:
        del inner[where[-1]]
    else:
        inner[where[-1]] = value
    return document


DELETED = object()
TEXT, SCALING, QUANT = "text_config", ("text_config", "rope_scaling"), "quantization_config"


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("extra",), 1, r"unknown key 'extra' = 1"),
        (("model_type",), "llama", r"model_type is 'llama'; accepted: deepseek_v41"),
        ((TEXT,), DELETED, "has no text_config"),
        ((TEXT,), [], "text_config holds list; an object is needed"),
        ((TEXT, "num_experts"), 4, r"text_config: unknown key 'num_experts' = 4"),
        ((TEXT, "hidden_size"), DELETED, "missing hidden_size"),
        ((TEXT, "hidden_size"), 256.0, "hidden_size is 256.0; an integer is needed"),
        ((TEXT, "hidden_size"), True, "hidden_size is True; an integer is needed"),
        ((TEXT, "hidden_size"), "256", "hidden_size is '256'; an integer is needed"),
        ((TEXT, "rope_theta"), "1e4", "rope_theta is '1e4'; a finite number is needed"),
        ((TEXT, "rope_theta"), float("nan"), "rope_theta is nan; a finite number is needed"),
        ((TEXT, "hc_eps"), float("inf"), "hc_eps is inf; a finite number is needed"),
        ((TEXT, "compress_ratios"), 2, "compress_ratios is 2; a list of integers is needed"),
        ((TEXT, "engram_layer_ids"), [1, 3.0], "a list of integers is needed"),
        ((TEXT, "hidden_act"), "gelu", "hidden_act is 'gelu'; accepted: 'silu'"),
        ((TEXT, "n_shared_experts"), 2, "n_shared_experts is 2; accepted: 1"),
        ((TEXT, "scoring_func"), DELETED, "scoring_func is missing; accepted: 'sqrtsoftplus'"),
        ((QUANT,), DELETED, "quant_method is missing; accepted: 'fp8'"),
        ((QUANT,), None, "quantization_config holds NoneType; an object is needed"),
        ((QUANT, "scale_fmt"), "fp32", "scale_fmt is 'fp32'; accepted: 'ue8m0'"),
        ((QUANT, "weight_block_size"), [128, 128], r"is \[128, 128\]; accepted: \[32, 32\]"),
        ((QUANT, "bits"), 8, "quantization_config: unknown key 'bits' = 8"),
        (SCALING, None, "rope_scaling holds NoneType; an object is needed"),
        ((*SCALING, "rope_type"), "linear", r"rope_scaling type is \['linear'\]; accepted: yarn"),
        ((*SCALING, "rope_type"), DELETED, r"rope_scaling type is \[\]; accepted: yarn"),
        ((*SCALING, "type"), "linear", r"type is \['linear', 'yarn'\]; accepted: yarn"),
        ((*SCALING, "mscale"), 1.0, "rope_scaling: unknown key 'mscale'"),
        ((*SCALING, "factor"), DELETED, "rope_scaling lacks factor"),
        ((*SCALING, "factor"), 0, "needs positive numbers"),
        ((*SCALING, "beta_fast"), float("inf"), "needs positive numbers"),
        ((*SCALING, "original_max_position_embeddings"), 64.5, "is 64.5; no whole number"),
    ],
)
def test_a_value_that_is_unknown_missing_or_of_another_kind_is_refused(where, value, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(changed(where, value))


# Values that contradict each other ----------------------------------------------------------------

POSITIVE = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "o_groups",
    "q_lora_rank",
    "sliding_window",
    "index_topk",
    "candidate_topk_blocks",
    "candidate_block_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "n_routed_experts",
    "rms_norm_eps",
    "swiglu_limit",
    "max_position_embeddings",
]
CONTRADICTIONS = [
    *((name, 0, f"{name} is 0(.0)?; it must be positive") for name in POSITIVE),
    ("num_nextn_predict_layers", -1, "num_nextn_predict_layers is -1; it must not be negative"),
    ("compress_ratios", [0] * 10, r"lists 10 layers, not 8 \+ 3 draft blocks"),
    ("compress_ratios", [0, 0, 2, 2, 2, 1, 1, 4, 0, 0, 0], "may hold 0, 1 and 2"),
    ("compress_ratios", [0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 1], "draft blocks must have .* 0"),
    ("compress_ratios", [0, 2, 2, 2, 2, 1, 1, 1, 0, 0, 0], "must begin at layer 1, the first"),
    ("compress_ratios", [0, 0, 2, 1, 2, 1, 1, 1, 0, 0, 0], "layer 3 has ratio 1 but its kv source"),
    ("num_attention_heads", 12, "num_attention_heads 12 is no multiple of o_groups 8"),
    ("qk_rope_head_dim", 15, "qk_rope_head_dim 15 must be even and fit"),
    ("qk_rope_head_dim", 34, "qk_rope_head_dim 34 must be even and fit"),
    ("hidden_size", 272, "hidden_size is 272; a multiple of 32 is needed"),
    ("moe_intermediate_size", 48, "moe_intermediate_size is 48; a multiple of 32"),
    ("index_head_dim", 48, "index_head_dim is 48; a multiple of 32"),
    ("head_dim", 72, "head_dim is 72; a multiple of 16"),
    ("num_experts_per_tok", 13, "more experts per token than experts"),
    ("dspark_num_experts_per_tok", 7, "more experts per token than experts"),
    ("kv_source_layer_ids", [5, 2], r"kv_source_layer_ids \[5, 2\] must ascend"),
    ("kv_source_layer_ids", [2, 2], "must ascend"),
    ("kv_source_layer_ids", [1, 5], "name layers with a compress_ratio above 0"),
    ("kv_source_layer_ids", [], "must begin at layer 2"),
    ("kv_source_layer_ids", [2, 5, 8], "name layers with a compress_ratio above 0"),
    ("index_source_layer_ids", [2, 6, 7], "every kv source must be an index source"),
    ("candidate_source_layer_id", 4, "candidate_source_layer_id 4 is not an index source"),
    ("candidate_source_layer_id", 2, r"kv sources \[5\] come after the candidate source 2"),
    ("engram_num_embeddings", [660], "differ in length"),
    ("engram_layer_ids", [3, 1], "must ascend within the layers"),
    ("engram_layer_ids", [1, 8], "must ascend within the layers"),
    ("engram_max_ngram_size", 1, "engram_max_ngram_size must be at least 2"),
    ("engram_n_heads", 0, "engram sizes must be positive"),
    ("engram_vocab_size", 1, "engram sizes must be positive"),
    ("engram_head_dim", 0, "engram_head_dim is 0; it must be positive"),
    ("engram_compressed_vocab_size", 513, "engram_compressed_vocab_size is 513; 1..512"),
    ("engram_compressed_vocab_size", 0, "engram_compressed_vocab_size is 0; 1..512"),
    ("engram_pad_token_id", 512, r"engram_pad_token_id is 512; 0..511 is needed"),
    ("eos_token_id", -1, r"eos_token_id is -1; 0..511 is needed"),
    ("dspark_noise_token_id", 512, "dspark_noise_token_id is 512, outside the vocabulary"),
    ("dspark_block_size", 0, "dspark_block_size and dspark_markov_rank must be positive"),
    ("dspark_markov_rank", 0, "dspark_block_size and dspark_markov_rank must be positive"),
    ("dspark_target_layer_ids", [], r"dspark_target_layer_ids \[\] must name layers"),
    ("dspark_target_layer_ids", [5, 8], "must name layers, each once"),
    ("dspark_target_layer_ids", [5, 5], "must name layers, each once"),
]


@pytest.mark.parametrize(("name", "value", "message"), CONTRADICTIONS)
def test_values_that_do_not_fit_together_are_refused(name, value, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(changed((TEXT, name), value))


def test_what_is_not_there_need_not_fit():
    """Without Engram layers and drafts their sizes mean nothing."""
    config = mini_config(engram_layer_ids=[], num_nextn_predict_layers=0)
    text = config["text_config"]
    for name in ("engram_max_ngram_size", "engram_vocab_size", "engram_n_heads", "engram_head_dim"):
        text[name] = 0
    text |= {"dspark_block_size": 0, "dspark_target_layer_ids": [], "dspark_noise_token_id": 999}
    assert parse_config(config).engram_layer_ids == ()


def test_groups_may_end_inside_a_block():
    assert not parse_config(mini_config(o_lora_rank=24)).groups_fill_blocks
