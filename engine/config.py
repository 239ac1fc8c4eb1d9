"""The model's hyper-parameters: read from the nested `config.json`, checked, derived values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from engine.errors import ConfigError, must_be_one_of

FP8_BLOCK = 32
"""Rows and columns of an FP8 weight block, and channels per activation or FP4 scale."""
FP4_KV_BLOCK = 16
"""Channels per E4M3 scale of the compressed latent."""

_OUTER_KEYS = {
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "image_token_id",
    "quantization_config",
    "text_config",
    "vision_config",
}
_QUANTISATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_FIXED_TEXT = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
_OPTIONAL_FIXED = frozenset({"tie_word_embeddings", "attention_bias", "model_type"})
_YARN_KINDS = ("rope_type", "type")
_YARN_KEYS = {"factor", "beta_fast", "beta_slow", "original_max_position_embeddings"}


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of the rotary frequencies of the layers with a compressed part."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """The text model; names follow the checkpoint's `text_config`, dimensions in items."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Yarn
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2

    @property
    def num_layers_with_drafts(self) -> int:
        """Target layers and draft blocks together."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def heads_per_group(self) -> int:
        """Attention heads that share one slice of the output projection."""
        return self.num_attention_heads // self.o_groups

    @cached_property
    def engram_buckets(self) -> int:
        """Hash buckets per Engram layer: (n-gram size, head) pairs."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def groups_fill_blocks(self) -> bool:
        """Whether no quantisation block of the output projection's input spans two groups."""
        return self.o_lora_rank % FP8_BLOCK == 0

    @property
    def mix_width(self) -> int:
        """Coefficients of one hyper-connection set: pre, post and comb."""
        return (2 + self.hc_mult) * self.hc_mult

    def ratio(self, layer: int) -> int:
        """Compression ratio of a target layer or (counted on) a draft block."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed cache `layer` reads."""
        return max(s for s in self.kv_source_layer_ids if s <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose selection `layer` uses."""
        return max(s for s in self.index_source_layer_ids if s <= layer)

    def to_json(self) -> dict:
        """The nested document that `parse_config` reads back to an equal configuration."""
        text = {f.name: getattr(self, f.name) for f in fields(self)}
        outer = {k: text.pop(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        text["rope_scaling"] = {"rope_type": "yarn", **vars(self.rope_scaling)}
        text = {k: list(v) if isinstance(v, tuple) else v for k, v in text.items()}
        return {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            **outer,
            "quantization_config": _QUANTISATION,
            "text_config": {**_FIXED_TEXT, **text},
        }


def read_config(path: Path) -> ModelConfig:
    """Read `config.json`, or the one inside a directory. Raises ConfigError."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return parse_config(document, str(path))


def parse_config(document: Mapping, where: str = "config.json") -> ModelConfig:
    """The configuration of a nested document; every key is used, fixed or refused by name."""
    _refuse_unknown(document, _OUTER_KEYS, where)
    if document.get("model_type") != "deepseek_v41":
        raise ConfigError(
            f"{where}: {must_be_one_of('model_type', document.get('model_type'), ['deepseek_v41'])}"
        )
    quantisation = document.get("quantization_config", {})
    _refuse_unknown(quantisation, set(_QUANTISATION), f"{where} quantization_config")
    _require_fixed(quantisation, _QUANTISATION, f"{where} quantization_config")
    if "text_config" not in document:
        raise ConfigError(f"{where} has no text_config")
    text = document["text_config"]
    _refuse_unknown(text, {*_FIXED_TEXT, *ModelConfig.__dataclass_fields__}, f"{where} text_config")
    _require_fixed(text, _FIXED_TEXT, f"{where} text_config", _OPTIONAL_FIXED)
    text = {k: v for k, v in text.items() if k not in _FIXED_TEXT}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        text.setdefault(key, document.get(key, ModelConfig.__dataclass_fields__[key].default))
    config = _build(text, f"{where} text_config")
    _check(config, where)
    return config


def _refuse_unknown(found: object, known: set[str], where: str) -> None:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where} holds {type(found).__name__}; an object is needed")
    for key in found:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r} = {found[key]!r}")


def _require_fixed(
    found: Mapping, fixed: Mapping, where: str, optional: frozenset[str] = frozenset()
) -> None:
    for key, value in fixed.items():
        if key not in found:
            if key not in optional:
                raise ConfigError(f"{where}: {key} is missing; accepted: {value!r}")
        elif found[key] != value:
            raise ConfigError(f"{where}: {key} is {found[key]!r}; accepted: {value!r}")


def _build(text: Mapping, where: str) -> ModelConfig:
    known = {f.name: f for f in fields(ModelConfig)}
    missing = sorted(set(known) - set(text))
    if missing:
        raise ConfigError(f"{where}: missing {', '.join(missing)}")
    values = {name: _value(name, text[name], known[name].type, where) for name in known}
    return ModelConfig(**values)


def _value(name: str, value: object, kind: str, where: str) -> object:
    if kind == "Yarn":
        return _yarn(value, where)
    if kind == "tuple[int, ...]":
        if not isinstance(value, list | tuple) or not all(type(v) is int for v in value):
            raise ConfigError(f"{where}: {name} is {value!r}; a list of integers is needed")
        return tuple(value)
    if kind == "int":
        if type(value) is not int:
            raise ConfigError(f"{where}: {name} is {value!r}; an integer is needed")
        return value
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ConfigError(f"{where}: {name} is {value!r}; a finite number is needed")
    return float(value)


def _yarn(value: object, where: str) -> Yarn:
    _refuse_unknown(value, {*_YARN_KEYS, *_YARN_KINDS}, f"{where} rope_scaling")
    kinds = sorted({str(value[key]) for key in _YARN_KINDS if key in value})
    if kinds != ["yarn"]:
        raise ConfigError(f"{where}: rope_scaling type is {kinds}; accepted: yarn")
    rest = {k: v for k, v in value.items() if k not in _YARN_KINDS}
    if missing := sorted(_YARN_KEYS - set(rest)):
        raise ConfigError(f"{where}: rope_scaling lacks {', '.join(missing)}")
    if not all(type(v) in (int, float) and 0 < v < math.inf for v in rest.values()):
        raise ConfigError(f"{where}: rope_scaling {rest} needs positive numbers")
    length = rest.pop("original_max_position_embeddings")
    if length != int(length):
        raise ConfigError(f"{where}: original_max_position_embeddings is {length}; no whole number")
    floats = {k: float(v) for k, v in rest.items()}
    return Yarn(**floats, original_max_position_embeddings=int(length))


def _check(c: ModelConfig, where: str) -> None:
    def need(holds: bool, sentence: str) -> None:
        if not holds:
            raise ConfigError(f"{where}: {sentence}")

    for name in _POSITIVE:
        need(getattr(c, name) > 0, f"{name} is {getattr(c, name)}; it must be positive")
    layers, drafts = c.num_hidden_layers, c.num_nextn_predict_layers
    need(drafts >= 0, f"num_nextn_predict_layers is {drafts}; it must not be negative")
    need(
        len(c.compress_ratios) == c.num_layers_with_drafts,
        f"compress_ratios lists {len(c.compress_ratios)} layers, not "
        f"{layers} + {drafts} draft blocks",
    )
    need(all(r in (0, 1, 2) for r in c.compress_ratios), "compress_ratios may hold 0, 1 and 2")
    need(not any(c.compress_ratios[layers:]), "draft blocks must have compress_ratio 0")
    need(
        c.num_attention_heads % c.o_groups == 0,
        f"num_attention_heads {c.num_attention_heads} is no multiple of o_groups {c.o_groups}",
    )
    need(
        c.qk_rope_head_dim % 2 == 0 and c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim),
        f"qk_rope_head_dim {c.qk_rope_head_dim} must be even and fit into both head dims",
    )
    for name, unit in _MULTIPLES.items():
        value = getattr(c, name)
        need(value % unit == 0, f"{name} is {value}; a multiple of {unit} is needed")
    need(
        c.num_experts_per_tok <= c.n_routed_experts
        and c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts,
        "more experts per token than experts",
    )
    _check_sources(c, need)
    _check_engram(c, need)
    _check_tokens(c, need)


_POSITIVE = (
    "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads head_dim "
    "qk_rope_head_dim q_lora_rank o_lora_rank o_groups swiglu_limit rms_norm_eps "
    "max_position_embeddings rope_theta n_routed_experts num_experts_per_tok sliding_window "
    "compress_rope_theta index_n_heads index_head_dim index_topk candidate_topk_blocks "
    "candidate_block_size hc_mult hc_sinkhorn_iters routed_scaling_factor dspark_n_routed_experts "
    "dspark_num_experts_per_tok"
).split()
_MULTIPLES = {
    "hidden_size": FP8_BLOCK,
    "moe_intermediate_size": FP8_BLOCK,
    "index_head_dim": FP8_BLOCK,
    "head_dim": FP4_KV_BLOCK,
}
"""Packed FP4 and the shares of ranks need whole blocks; other widths may end in a part of one."""


def _check_sources(c: ModelConfig, need) -> None:
    layers = range(c.num_hidden_layers)
    compressed = [i for i in layers if c.ratio(i) > 0]
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = getattr(c, name)
        need(
            list(ids) == sorted(set(ids)) and all(i in compressed for i in ids),
            f"{name} {list(ids)} must ascend and name layers with a compress_ratio above 0",
        )
        need(
            not compressed or (ids and ids[0] == compressed[0]),
            f"{name} {list(ids)} must begin at layer {compressed[0] if compressed else None}, "
            "the first with a compress_ratio above 0",
        )
    need(
        set(c.kv_source_layer_ids) <= set(c.index_source_layer_ids),
        "every kv source must be an index source: a selection counts the entries of its own cache",
    )
    for layer in compressed:
        need(
            c.ratio(layer) == c.ratio(c.kv_source(layer)),
            f"layer {layer} has ratio {c.ratio(layer)} but its kv source {c.kv_source(layer)} "
            f"has {c.ratio(c.kv_source(layer))}",
        )
    source = c.candidate_source_layer_id
    need(
        not compressed or source in c.index_source_layer_ids,
        f"candidate_source_layer_id {source} is not an index source",
    )
    later = [i for i in c.kv_source_layer_ids if i > source]
    need(not later, f"kv sources {later} come after the candidate source {source}")


def _check_engram(c: ModelConfig, need) -> None:
    need(
        len(c.engram_layer_ids) == len(c.engram_num_embeddings),
        "engram_layer_ids and engram_num_embeddings differ in length",
    )
    need(
        list(c.engram_layer_ids) == sorted(set(c.engram_layer_ids))
        and all(0 <= i < c.num_hidden_layers for i in c.engram_layer_ids),
        f"engram_layer_ids {list(c.engram_layer_ids)} must ascend within the layers",
    )
    if c.engram_layer_ids:
        need(c.engram_max_ngram_size >= 2, "engram_max_ngram_size must be at least 2")
        need(c.engram_n_heads > 0 and c.engram_vocab_size > 1, "engram sizes must be positive")
        need(c.engram_head_dim > 0, f"engram_head_dim is {c.engram_head_dim}; it must be positive")
        need(
            0 < c.engram_compressed_vocab_size <= c.vocab_size,
            f"engram_compressed_vocab_size is {c.engram_compressed_vocab_size}; "
            f"1..{c.vocab_size} is needed",
        )


def _check_tokens(c: ModelConfig, need) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "engram_pad_token_id"):
        value = getattr(c, name)
        need(0 <= value < c.vocab_size, f"{name} is {value}; 0..{c.vocab_size - 1} is needed")
    if c.num_nextn_predict_layers:
        value = c.dspark_noise_token_id
        need(0 <= value < c.vocab_size, f"dspark_noise_token_id is {value}, outside the vocabulary")
        need(
            c.dspark_block_size > 0 and c.dspark_markov_rank > 0,
            "dspark_block_size and dspark_markov_rank must be positive",
        )
        need(
            0 < len(targets := c.dspark_target_layer_ids) == len(set(targets))
            and all(0 <= i < c.num_hidden_layers for i in targets),
            f"dspark_target_layer_ids {list(targets)} must name layers, each once",
        )
