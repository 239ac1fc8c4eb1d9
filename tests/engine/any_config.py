"""Any small configuration of the architecture, and the engine held to the oracle on it.

The checks know nothing of shards, pages or chunks beyond what they choose: every logit, draft id,
draft logit and confidence must have the oracle's bits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from engine.config import ModelConfig, parse_config
from engine.recipe import Recipe
from engine.request import DraftStep
from fixtures.checkpoints.random_mini import mini_config, write_random_checkpoint
from fixtures.local_ranks import LocalRanks
from suites.numerics.oracle import History, Oracle
from suites.numerics.oracle_draft import Draft, lowest_argmax
from tests.engine.runs import assert_same_bits, some_ids

STEPS = 3


@dataclass(frozen=True)
class Truth:
    """What the oracle says: logits of the prompt and of each greedy step, and the drafts there."""

    ids: tuple[int, ...]
    prompt: int
    logits: np.ndarray
    drafts: tuple[Draft, ...]


def truth_of(oracle: Oracle, prompt: tuple[int, ...]) -> Truth:
    """Prompt, then STEPS greedy steps, with drafts after each of them."""
    history, ids = History(), list(prompt)
    logits = [oracle.extend(history, list(prompt))["logits_all"]]
    drafts = []
    for _ in range(STEPS):
        ids.append(lowest_argmax(logits[-1][-1]))
        logits.append(oracle.extend(history, ids[-1:])["logits_all"])
        if oracle.config.num_nextn_predict_layers:
            drafts.append(oracle.draft(history, lowest_argmax(logits[-1][-1])))
    found = np.concatenate([part.numpy() for part in logits]).astype(np.float32)
    return Truth(tuple(ids), len(prompt), found, tuple(drafts))


def written(directory: Path, document: dict, seed: int) -> tuple[ModelConfig, Oracle]:
    """A random checkpoint in `directory`, its configuration, and the oracle over it."""
    text = document["text_config"]
    if not text["kv_source_layer_ids"]:
        # The oracle takes no candidate source where there is none; the format has a number.
        text["candidate_source_layer_id"] = None
    write_random_checkpoint(directory, document, seed)
    oracle = Oracle(directory)
    text["candidate_source_layer_id"] = text["candidate_source_layer_id"] or 0
    (directory / "config.json").write_text(json.dumps(document))
    return parse_config(document), oracle


def assert_engine_is_right(
    directory: Path, truth: Truth, recipe: Recipe, threads: int = 1
) -> None:
    """Prompt in chunks, then decode step by step with drafts, on scattered pages."""
    needed = -(-(len(truth.ids) + 1) // recipe.kv_page_tokens)
    pages = np.random.default_rng(needed).permutation(needed).tolist()
    where = f"{recipe.ranks} ranks"
    with LocalRanks(directory, recipe, pages=needed, threads=threads) as ranks:
        slot = recipe.max_concurrency - 1
        prompt = truth.ids[: truth.prompt]
        logits = ranks.prefill(prompt, slot=slot, pages=pages)
        assert_same_bits(logits, truth.logits[: truth.prompt], f"prompt at {where}")
        for step, at in enumerate(range(truth.prompt, len(truth.ids))):
            one = ranks.sequence(truth.ids, at, truth.ids[at : at + 1], slot, pages)
            (logits,) = ranks.step(one)
            assert_same_bits(logits[0], truth.logits[at], f"step {step} at {where}")
            if recipe.mtp_draft_tokens and truth.drafts:
                chosen = int(logits[0].argmax())
                drafts = ranks.draft(DraftStep(slot, at, chosen))
                assert_drafts(drafts, truth.drafts[step], recipe.mtp_draft_tokens, where)


def assert_drafts(drafts, expected: Draft, count: int, where: str) -> None:
    assert drafts.ids[0].tolist() == expected.ids[1 : count + 1], f"draft ids at {where}"
    for name in ("logits", "confidence"):
        rows = getattr(expected, name).numpy().astype(np.float32)[:count]
        assert_same_bits(getattr(drafts, name)[0], rows, f"draft {name} at {where}")


def prompt_of(config: ModelConfig, seed: int, count: int) -> tuple[int, ...]:
    """Ids below the vocabulary."""
    return some_ids(seed, count, config.vocab_size)


# Generated configurations -------------------------------------------------------------------------


@st.composite
def compressed_layers(draw, layers: int) -> dict:
    """Ratios, sources and the candidate source of target layers."""
    first = draw(st.integers(0, layers))
    ratios, kv, index = [0] * layers, [], []
    for layer in range(first, layers):
        roles = ["full"] if layer == first else ["full", "index", "reuse", "none"]
        role = draw(st.sampled_from(roles))
        if role == "none":
            continue
        if role == "full":
            kv.append(layer)
            ratio = draw(st.sampled_from([1, 2]))
        if role != "reuse":
            index.append(layer)
        ratios[layer] = ratio
    late = [layer for layer in index if layer >= kv[-1]]
    return {
        "compress_ratios": ratios,
        "kv_source_layer_ids": kv,
        "index_source_layer_ids": index,
        "candidate_source_layer_id": draw(st.sampled_from(late)) if late else None,
        "index_n_heads": draw(st.integers(1, 5)),
        "index_topk": draw(st.integers(1, 12)),
        "candidate_topk_blocks": draw(st.integers(1, 5)),
        "candidate_block_size": draw(st.integers(1, 5)),
    }


@st.composite
def widths(draw) -> dict:
    """Heads and widths, several of them no multiple of 32."""
    groups, head = draw(st.integers(1, 5)), 16 * draw(st.integers(1, 4))
    key = 32 * draw(st.integers(1, 2))
    return {
        "hidden_size": 32 * draw(st.integers(1, 3)),
        "moe_intermediate_size": 32 * draw(st.integers(1, 3)),
        "o_groups": groups,
        "num_attention_heads": groups * draw(st.integers(1, 3)),
        "head_dim": head,
        "index_head_dim": key,
        "qk_rope_head_dim": 2 * draw(st.integers(1, min(head, key) // 2)),
        "q_lora_rank": draw(st.sampled_from([8, 32, 40])),
        "o_lora_rank": draw(st.sampled_from([8, 24, 32, 40, 64])),
        "sliding_window": draw(st.integers(1, 20)),
        "hc_mult": draw(st.integers(1, 4)),
        "hc_sinkhorn_iters": draw(st.integers(1, 5)),
        "swiglu_limit": draw(st.sampled_from([1.0, 10.0])),
        "max_position_embeddings": 256,
    }


@st.composite
def tables(draw, layers: int) -> dict:
    """Vocabulary, experts, Engram and drafts."""
    vocab, experts = draw(st.integers(7, 120)), draw(st.integers(1, 9))
    drafts, layer = draw(st.integers(0, 2)), st.integers(0, layers - 1)
    draft_experts = draw(st.integers(1, 6))
    return {
        "vocab_size": vocab,
        "n_routed_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, min(experts, 4))),
        "engram_layer_ids": sorted(draw(st.sets(layer, max_size=2))),
        "engram_max_ngram_size": draw(st.integers(2, 4)),
        "engram_vocab_size": draw(st.integers(2, 60)),
        "engram_n_heads": draw(st.integers(1, 3)),
        "engram_head_dim": draw(st.sampled_from([8, 32, 48])),
        "num_nextn_predict_layers": drafts,
        "dspark_block_size": draw(st.integers(1, 5)),
        "dspark_target_layer_ids": draw(st.lists(layer, min_size=1, max_size=3, unique=True)),
        "dspark_markov_rank": draw(st.sampled_from([4, 24, 32])),
        "dspark_n_routed_experts": draft_experts,
        "dspark_num_experts_per_tok": draw(st.integers(1, draft_experts)),
    }


@st.composite
def configs(draw) -> dict:
    """The nested configuration of a small model."""
    layers = draw(st.integers(1, 5))
    text = draw(compressed_layers(layers)) | draw(widths()) | draw(tables(layers))
    text["compress_ratios"] = text["compress_ratios"] + [0] * text["num_nextn_predict_layers"]
    return mini_config(num_hidden_layers=layers, **text)


@st.composite
def recipes(draw, config: dict) -> Recipe:
    """A recipe at one rank: chunk, pages, strategy and drafts as they come."""
    block = config["text_config"]["dspark_block_size"]
    return Recipe(
        ranks=1,
        max_concurrency=draw(st.integers(1, 3)),
        mtp_draft_tokens=draw(st.integers(0, block)),
        prefill_chunk=draw(st.sampled_from([3, 16, 64])),
        kv_page_tokens=draw(st.sampled_from([2, 6, 128])),
        scratch=draw(st.sampled_from(["planned", "pools", "none"])),
    )
