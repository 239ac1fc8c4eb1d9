"""Checkpoint access of the oracle: nested config and dequantised float64 tensors by name.

Reads a release-format directory with the `safetensors` package. It does not know whether the
checkpoint is complete or well formed beyond the tensors that the forward asks for.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

from safetensors import safe_open
from torch import Tensor

from suites.numerics import oracle_formats as formats

FIXED = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
}


def read_config(directory: Path) -> SimpleNamespace:
    """The `text_config` of `config.json` as attributes; what the oracle cannot compute raises."""
    text = json.loads((directory / "config.json").read_text())["text_config"]
    for key, expected in FIXED.items():
        if text[key] != expected:
            raise ValueError(f"{key} is {text[key]!r}; the oracle computes only {expected!r}")
    scaling = text["rope_scaling"]
    if scaling and scaling.get("rope_type", scaling.get("type")) != "yarn":
        raise ValueError(f"rope_scaling is {scaling!r}; the oracle computes only kind 'yarn'")
    kv, index = text["kv_source_layer_ids"], text["index_source_layer_ids"]
    if not set(kv) <= set(index):
        raise ValueError(f"kv sources {kv} must be among the index sources {index}")
    candidate = text["candidate_source_layer_id"]
    if candidate is not None and (candidate not in index or max(kv, default=0) > candidate):
        raise ValueError(
            f"candidate source {candidate} must be one of the index sources {index} and not come "
            f"before the last of the kv sources {kv}"
        )
    return SimpleNamespace(**text)


class Weights:
    """Tensors of one checkpoint as stored float64 values, read on demand and kept.

    `plain` returns a BF16 or F32 tensor, `fp8` a matrix with 32x32 block scales, `fp4` a packed
    expert matrix; names are those of the checkpoint without `.weight` where a `.scale` belongs.
    """

    def __init__(self, directory: Path) -> None:
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        self.shard_of = index["weight_map"]
        self.files = {
            shard: safe_open(directory / shard, "pt") for shard in set(self.shard_of.values())
        }
        self.plain = lru_cache(maxsize=None)(self._plain)
        self.fp8 = lru_cache(maxsize=None)(self._fp8)
        self.fp4 = lru_cache(maxsize=None)(self._fp4)

    def raw(self, name: str) -> Tensor:
        if name not in self.shard_of:
            raise KeyError(f"tensor {name!r} is not in the checkpoint's index")
        return self.files[self.shard_of[name]].get_tensor(name)

    def _plain(self, name: str) -> Tensor:
        return self.raw(name).double()

    def _fp8(self, name: str) -> Tensor:
        return formats.dequantise_fp8_blocks(self.raw(f"{name}.weight"), self.raw(f"{name}.scale"))

    def _fp4(self, name: str) -> Tensor:
        return formats.dequantise_fp4(self.raw(f"{name}.weight"), self.raw(f"{name}.scale"))

    def fp8_rows(self, name: str, rows: Tensor) -> Tensor:
        """Rows of an FP8 table with per-row scales: `rows` [...] gives [..., width]."""
        weight, scale = self.raw(f"{name}.weight"), self.raw(f"{name}.scale")
        flat = rows.flatten()
        table = formats.dequantise_rows(weight[flat], scale[flat])
        return formats.bf16(table).unflatten(0, rows.shape)
