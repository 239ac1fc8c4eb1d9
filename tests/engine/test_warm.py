"""The kernel cache is filled by one run and found by the next."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine.warm import compile_kernels, tiny_config

TAKEN = "from engine.warm import compile_kernels; print(compile_kernels())"


def run(cache) -> float:
    environ = {**os.environ, "SPARKPROOF_KERNEL_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", TAKEN], env=environ, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_a_complete_cache_compiles_nothing(tmp_path):
    (tmp_path / "complete").touch()
    said = []
    assert compile_kernels(said.append, tmp_path) == 0.0
    assert said == []


def test_the_tiny_model_has_every_mechanism():
    config = tiny_config()
    assert set(config.compress_ratios) == {0, 1, 2}
    assert config.engram_layer_ids and config.num_nextn_predict_layers
    assert config.index_source_layer_ids[-1] > config.candidate_source_layer_id


@pytest.mark.slow
def test_one_run_fills_the_cache_for_the_next(tmp_path):
    assert run(tmp_path) > 0
    kernels = {path.name.split(".")[1].split("-")[0] for path in tmp_path.rglob("*.nbi")}
    assert {"attend_rows", "run_experts", "select_tiles", "sum_f64", "mix_rows"} <= kernels
    assert run(tmp_path) == 0.0
