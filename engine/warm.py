"""Compiles the kernels once per machine and source state, before anybody waits for a rank.

A tiny model of zeros is run through every graph; what it compiles is kept in the kernel cache. Ranks
of one host that start together take turns, so only the first of them compiles.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.comm import Communicator
from engine.config import ModelConfig, Yarn
from engine.core import LeadCore
from engine.engram import bucket_primes
from engine.exchange import sum_bf16, sum_f64, sum_f64_to_bf16
from engine.mapping import plan_model
from engine.mesh import Mesh
from engine.ops import kernel_cache
from engine.rank import RankModel
from engine.recipe import Recipe
from engine.request import DraftStep, SequenceStep
from engine.shard import rank_weights

_COMPLETE = "complete"
PROMPT_ROWS = 80
"""Enough rows for tiles of products, of experts and of index scores."""


def compile_kernels(
    say: Callable[[str], None] = lambda text: None, cache: Path | None = None
) -> float:
    """Make sure that the kernel cache is complete; seconds that compiling took, 0.0 if it was.

    `say` is told once before a wait of about a minute.
    """
    folder = Path(cache) if cache is not None else kernel_cache()
    if (folder / _COMPLETE).exists():
        return 0.0
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _COMPLETE).exists():
            return 0.0
        say(f"compiling kernels into {folder}, once for this version: about a minute")
        start = time.monotonic()
        run_everything()
        (folder / _COMPLETE).touch()
        return time.monotonic() - start


def tiny_config() -> ModelConfig:
    """Every mechanism at the least size that takes every path of the kernels."""
    config = ModelConfig(
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=32,
        o_lora_rank=32,
        o_groups=2,
        swiglu_limit=10.0,
        rms_norm_eps=1e-20,
        max_position_embeddings=512,
        rope_theta=10000.0,
        rope_scaling=Yarn(16.0, 32.0, 1.0, 64),
        n_routed_experts=4,
        num_experts_per_tok=2,
        routed_scaling_factor=1.0,
        sliding_window=8,
        compress_ratios=(0, 2, 1, 1, 0),
        compress_rope_theta=160000.0,
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        index_n_heads=2,
        index_head_dim=32,
        index_topk=4,
        candidate_source_layer_id=2,
        candidate_topk_blocks=2,
        candidate_block_size=4,
        hc_mult=2,
        hc_sinkhorn_iters=2,
        hc_eps=1e-6,
        engram_layer_ids=(1,),
        engram_num_embeddings=(0,),
        engram_max_ngram_size=2,
        engram_vocab_size=11,
        engram_n_heads=1,
        engram_head_dim=32,
        engram_pad_token_id=2,
        engram_compressed_vocab_size=64,
        num_nextn_predict_layers=1,
        dspark_block_size=2,
        dspark_noise_token_id=3,
        dspark_target_layer_ids=(3,),
        dspark_markov_rank=32,
        dspark_n_routed_experts=2,
        dspark_num_experts_per_tok=1,
    )
    assert bucket_primes(config) == ((11,),), "the table of the tiny model has eleven rows"
    return config


def run_everything() -> None:
    """Run prefill, decode, head and draft of the tiny model, and the sums between ranks."""
    config = tiny_config()
    recipe = Recipe(ranks=1, max_concurrency=2, mtp_draft_tokens=2, prefill_chunk=128)
    planned = plan_model(config, recipe)
    weights = {
        w.name: np.zeros(w.nbytes, np.uint8)
        for w in rank_weights(config, recipe, planned.deals[0])
    }
    own = planned.ranks[0]
    comm = Communicator(None, 0, 1)
    model = RankModel(
        config, recipe, planned.deals, own.graphs, own.plan, weights, 4, comm, threads=1
    )
    fold = np.arange(config.vocab_size, dtype=np.int32)
    core = LeadCore(model, Mesh(0, 1, {}, lambda: None), fold)
    ids = tuple(i % config.vocab_size for i in range(PROMPT_ROWS))
    core.step([SequenceStep(0, 0, ids, (), (0,), (0, PROMPT_ROWS - 1))])
    core.step([SequenceStep(0, PROMPT_ROWS, ids[:5], ids, (0,), (4,))])
    core.step([SequenceStep(1, 0, ids[:1], (), (1,), (0,))])
    core.draft([DraftStep(0, PROMPT_ROWS + 4, 1)])
    core.close()
    parts = np.zeros((2, 2, 1, 8))
    bits = np.zeros((2, 1, 8), np.uint16)
    for gathered in (parts[0], parts[:, 0]):
        sum_f64(0, 1, gathered, np.zeros((1, 8)))
        sum_f64_to_bf16(0, 1, gathered, bits[0])
    sum_bf16(0, 1, bits, bits[0].copy())
