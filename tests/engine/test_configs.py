"""The engine has the oracle's bits on configurations unlike the golden one, at 1 to 8 ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from engine.config import parse_config
from engine.folding import fold_map
from engine.recipe import Recipe
from fixtures.checkpoints.random_mini import mini_config, other_config, write_random_checkpoint
from suites.numerics.oracle import Oracle
from tests.engine.any_config import (
    assert_engine_is_right,
    configs,
    prompt_of,
    recipes,
    truth_of,
    written,
)


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SMALL = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "vocab_size": 37,
    "num_attention_heads": 4,
    "o_groups": 2,
    "head_dim": 32,
    "index_n_heads": 2,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "dspark_n_routed_experts": 2,
    "engram_n_heads": 1,
    "engram_max_ngram_size": 3,
}
CASES = {
    "other at one rank": (other_config(), 1),
    "other at three ranks": (other_config(), 3),
    # Some ranks have no heads, experts, intermediate channels or buckets.
    "more ranks than groups": (mini_config(**SMALL), 8),
    "window only": (
        mini_config(
            **SMALL
            | {
                "num_hidden_layers": 2,
                "compress_ratios": [0, 0],
                "kv_source_layer_ids": [],
                "index_source_layer_ids": [],
                "candidate_source_layer_id": None,
                "engram_layer_ids": [],
                "num_nextn_predict_layers": 0,
                "hc_mult": 1,
            }
        ),
        3,
    ),
    # 24 rows of a group: blocks of 32 inputs of the output projection span ranks.
    "blocks that span groups": (mini_config(**SMALL | {"o_lora_rank": 24, "o_groups": 4}), 3),
}


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_unlike_the_golden_one_has_the_oracles_bits(tmp_path, name):
    document, ranks = CASES[name]
    config, oracle = written(tmp_path, document, 3)
    drafts = config.dspark_block_size if config.num_nextn_predict_layers else 2
    recipe = Recipe(
        ranks=ranks,
        max_concurrency=2,
        mtp_draft_tokens=drafts,
        prefill_chunk=29,
        kv_page_tokens=8,
    )
    assert_engine_is_right(tmp_path, truth_of(oracle, prompt_of(config, 5, 47)), recipe)


def test_a_folded_vocabulary_has_the_oracles_bits(tmp_path):
    """Words that differ in case fold together; the pad id folds onto itself."""
    words = ["<s>", "</s>", "<pad>", *(form for i in range(17) for form in (f"w{i}", f"W{i}"))]
    document = mini_config(**SMALL | {"engram_compressed_vocab_size": 3 + 17})
    write_random_checkpoint(tmp_path, document, 4)
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<s>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = parse_config(document)
    fold = fold_map(config, tmp_path / "tokenizer.json")
    ids = prompt_of(config, 6, 30)
    truth = truth_of(Oracle(tmp_path, fold=lambda token: int(fold[token])), ids)
    recipe = Recipe(ranks=2, max_concurrency=1, mtp_draft_tokens=3, prefill_chunk=16)
    assert_engine_is_right(tmp_path, truth, recipe)
    unfolded = truth_of(Oracle(tmp_path, fold=lambda token: token), ids)
    assert (unfolded.logits[:30] != truth.logits[:30]).any()


def check_any(data, many_ranks: bool) -> None:
    """One generated configuration at one rank, at three, and sometimes at more."""
    document = data.draw(configs(), label="configuration")
    recipe = data.draw(recipes(document), label="recipe")
    count = data.draw(st.sampled_from([3, 23, 40, 61]), label="prompt")
    seed = data.draw(st.integers(0, 99), label="seed")
    more = data.draw(st.sampled_from([2, 5, 8]), label="ranks") if many_ranks else 3
    with tempfile.TemporaryDirectory() as folder:
        config, oracle = written(Path(folder), document, seed)
        truth = truth_of(oracle, prompt_of(config, seed, count))
        for ranks in dict.fromkeys((1, 3, more)):
            assert_engine_is_right(Path(folder), truth, recipe.with_ranks(ranks))


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@settings(max_examples=4, derandomize=True, phases=[Phase.generate], **QUIET)
@given(st.data())
def test_any_configuration_has_the_oracles_bits(data):
    check_any(data, many_ranks=False)


@pytest.mark.slow
@settings(max_examples=60, print_blob=True, **QUIET)
@given(st.data())
def test_many_configurations_have_the_oracles_bits(data):
    check_any(data, many_ranks=True)


def test_one_changed_weight_on_disk_is_seen(tmp_path):
    """The comparison is not vacuous: the engine reads another weight than the oracle has read."""
    document = mini_config(**SMALL)
    config, oracle = written(tmp_path, document, 3)
    truth = truth_of(oracle, prompt_of(config, 5, 20))

    def altered(name, tensor):
        return tensor * 2 if name == "layers.5.attn.compressor.norm.weight" else tensor

    write_random_checkpoint(tmp_path, document, 3, alter=altered)
    recipe = Recipe(ranks=1, max_concurrency=1, mtp_draft_tokens=0, prefill_chunk=32)
    with pytest.raises(AssertionError, match="prompt at 1 ranks: .* differ, the first at"):
        assert_engine_is_right(tmp_path, truth, recipe)
