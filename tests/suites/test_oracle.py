"""The oracle reproduces every bit of the goldens, and stops doing so when it is altered."""

import ast
import json
import shutil
from pathlib import Path
from types import FunctionType

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures.checkpoints.random_mini import mini_config, other_config, write_random_checkpoint
from suites.numerics import oracle_attention, oracle_formats, oracle_layers
from suites.numerics.oracle import History, Oracle
from suites.numerics.oracle_weights import Weights, read_config

REPOSITORY = Path(__file__).parents[2]
MINI = REPOSITORY / "fixtures" / "goldens" / "mini"
slow = pytest.mark.slow


def same_bits(computed: torch.Tensor, golden: torch.Tensor) -> bool:
    """Equal shape and bytes once the float64 carrier is cast to the golden's type."""
    stored = computed.to(golden.dtype)
    same_shape = stored.shape == golden.shape
    return same_shape and torch.equal(
        stored.contiguous().view(torch.uint8), golden.contiguous().view(torch.uint8)
    )


def differing(computed: dict, golden: dict) -> list[str]:
    assert set(computed) == set(golden), set(computed) ^ set(golden)
    return sorted(name for name in golden if not same_bits(computed[name], golden[name]))


def prompt(length: int) -> list[int]:
    return load_file(MINI / f"prefill_{length}.safetensors")["input_ids"].tolist()


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(MINI)


@pytest.mark.parametrize("length", [5, 17, 64, 131, pytest.param(300, marks=slow)])
def test_prefill_equals_the_golden_in_every_bit(oracle, length):
    golden = load_file(MINI / f"prefill_{length}.safetensors")
    assert len(golden) == 44
    assert differing(oracle.prefill(prompt(length)), golden) == []


@pytest.mark.parametrize("length", [17, *(pytest.param(n, marks=slow) for n in (5, 64, 131, 300))])
def test_decode_and_drafts_equal_the_golden_in_every_bit(oracle, length):
    golden = load_file(MINI / f"decode_{length}.safetensors")
    assert len(golden) == 5
    assert differing(oracle.greedy(prompt(length), 24), golden) == []


@pytest.mark.parametrize("sizes", [(1, 2, 3, 7, 51), (16, 47, 1), (63, 1)])
def test_any_chunking_gives_the_bits_of_one_prefill(oracle, sizes):
    ids, history, parts = prompt(64), History(), []
    assert sum(sizes) == len(ids)
    for size in sizes:
        parts.append(oracle.extend(history, ids[len(history.tokens) :][:size]))
    golden = load_file(MINI / "prefill_64.safetensors")
    for name in ("logits_all", "resid.7", "main_hidden", "engram_hash_ids", "pre_mix.5"):
        assert same_bits(torch.cat([part[name] for part in parts]), golden[name]), name


# The oracle is not vacuous: altered mathematics, rounding or weights lose the golden. -------------


def direct_bf16(x: torch.Tensor) -> torch.Tensor:
    """One-step rounding to bf16 on the float64 bit pattern."""
    bits = x.contiguous().view(torch.int64)
    return ((bits + (1 << 44) - 1 + ((bits >> 45) & 1)) >> 45 << 45).view(torch.float64)


def unrounded(x: torch.Tensor) -> torch.Tensor:
    return x


def no_floor_to_even(x: torch.Tensor) -> torch.Tensor:
    """E2M1 rounding that sends every tie up."""
    above = x.abs().unsqueeze(-1) >= oracle_formats.FP4_MIDPOINTS
    return torch.copysign(oracle_formats.FP4_MAGNITUDES[above.sum(-1)], x)


ALTERATIONS = {
    "one-step bf16 in layers": (oracle_layers, "bf16", direct_bf16),
    "no bf16 in attention": (oracle_attention, "bf16", unrounded),
    "no fp32 in layers": (oracle_layers, "f32", unrounded),
    "index scores in bf16": (oracle_attention, "f32", oracle_formats.bf16),
    "fp4 ties upwards": (oracle_formats, "nearest_e2m1", no_floor_to_even),
    "no fp8 round trip of the window": (oracle_attention, "fp8_round_trip", unrounded),
    "no fp4 round trip of the latents": (oracle_attention, "fp4_round_trip_e4m3", unrounded),
    "no fp4 round trip of the index": (oracle_attention, "fp4_round_trip_e8m0", unrounded),
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_an_altered_rounding_point_loses_the_golden(oracle, monkeypatch, name):
    module, attribute, substitute = ALTERATIONS[name]
    monkeypatch.setattr(module, attribute, substitute)
    golden = load_file(MINI / "prefill_64.safetensors")
    assert "logits_all" in differing(oracle.prefill(prompt(64)), golden)


SOURCE_EDITS = {
    "sink missing in the denominator": (oracle_attention, " + (sink[:, None] - largest).exp()", ""),
    "relu missing in the indexer": (oracle_attention, ".relu()", ""),
    "newest block not kept": (oracle_attention, "= torch.inf\n", "+= 0\n"),
    "compressed key at the group's last token": (
        oracle_attention,
        "len(latent)) * ratio",
        "len(latent)) * ratio + ratio - 1",
    ),
    "window off by one": (oracle_attention, "behind < c.sliding_window", "behind <= 16"),
    "comb transposed": (oracle_layers, '"nij,nid->njd"', '"nji,nid->njd"'),
    "bias leaks into the weights": (oracle_layers, "scores.gather", "biased.gather"),
    "gate clamp missing": (oracle_layers, "gate.clamp(max=limit)", "gate"),
    "up clamp missing": (oracle_layers, "up.clamp(-limit, limit)", "up"),
}


def substitute_source(monkeypatch, module, old: str, new: str) -> None:
    """Swap the code of the module's functions in place: every importer runs the edit."""
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {module.__name__}"
    edited = dict(module.__dict__)
    exec(compile(source.replace(old, new), module.__file__, "exec"), edited)
    for name, function in list(module.__dict__.items()):
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            monkeypatch.setattr(function, "__code__", edited[name].__code__)


@pytest.mark.parametrize("name", SOURCE_EDITS)
def test_an_altered_formula_loses_the_golden(oracle, monkeypatch, name):
    module, old, new = SOURCE_EDITS[name]
    substitute_source(monkeypatch, module, old, new)
    golden = load_file(MINI / "prefill_64.safetensors")
    assert "logits_all" in differing(oracle.prefill(prompt(64)), golden)


def test_a_wrong_prime_walk_contradicts_the_config(oracle, monkeypatch):
    substitute_source(monkeypatch, oracle_layers, "used.add(candidate)", "used.clear()")
    with pytest.raises(ValueError, match=r"engram_num_embeddings \[660, 864\], primes give"):
        oracle.prefill(prompt(5))


def test_one_changed_weight_changes_the_logits(tmp_path):
    for file in MINI.glob("*.json"):
        shutil.copy(file, tmp_path)
    for file in MINI.glob("model-*.safetensors"):
        tensors = load_file(file)
        if "norm.weight" in tensors:
            tensors["norm.weight"][7] *= 2
        save_file(tensors, tmp_path / file.name)
    golden = load_file(MINI / "prefill_5.safetensors")
    assert differing(Oracle(tmp_path).prefill(prompt(5)), golden) == ["logits", "logits_all"]


# Other configurations -----------------------------------------------------------------------------

CONFIGS = {
    "other": other_config(),
    "no engram, no drafts": mini_config(
        num_hidden_layers=6,
        index_source_layer_ids=[2, 5],
        engram_layer_ids=[],
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=[],
    ),
    "window only": mini_config(
        num_hidden_layers=2,
        compress_ratios=[0, 0, 0],
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=None,
        engram_layer_ids=[0],
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=[1],
        rope_scaling=None,
        hc_mult=1,
    ),
    "ratio 4, no candidates": mini_config(
        num_hidden_layers=3,
        compress_ratios=[4, 4, 4, 0],
        kv_source_layer_ids=[0],
        index_source_layer_ids=[0, 2],
        candidate_source_layer_id=None,
        index_topk=4,
        engram_layer_ids=[],
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=[0, 2],
    ),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_random_checkpoint_runs_finite_and_deterministic(tmp_path, name, seed):
    config = CONFIGS[name]
    write_random_checkpoint(tmp_path, config, seed)
    ids = [(7 * seed + 31 * i * i) % config["text_config"]["vocab_size"] for i in range(37)]
    first, again = Oracle(tmp_path).greedy(ids, 2), Oracle(tmp_path).greedy(ids, 2)
    assert ("draft_ids" in first) == (config["text_config"]["num_nextn_predict_layers"] > 0)
    for key, value in first.items():
        assert torch.isfinite(value).all() and torch.equal(value, again[key]), key
    assert 0.5 < first["logits"].std() < 8


# Refusals and isolation ---------------------------------------------------------------------------


def test_a_token_outside_the_vocabulary_is_refused(oracle):
    with pytest.raises(ValueError, match="each below 512"):
        oracle.prefill([1, 512])
    with pytest.raises(ValueError, match="expected some"):
        oracle.prefill([])


def test_a_folded_vocabulary_without_a_fold_map_is_refused(tmp_path):
    config = mini_config(
        num_hidden_layers=2,
        compress_ratios=[0, 0],
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=None,
        engram_layer_ids=[1],
        engram_compressed_vocab_size=100,
        num_nextn_predict_layers=0,
    )
    write_random_checkpoint(tmp_path, config, 1)
    with pytest.raises(
        ValueError, match="engram_compressed_vocab_size 100 is below vocab_size 512"
    ):
        Oracle(tmp_path)
    folded = Oracle(tmp_path, fold=lambda token: token % 100)
    alike, unlike = folded.prefill([105, 7, 9]), folded.prefill([5, 7, 9])
    assert torch.equal(alike["engram_hash_ids"], unlike["engram_hash_ids"])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scoring_func", "softmax", "the oracle computes only 'sqrtsoftplus'"),
        ("rope_scaling", {"type": "linear"}, "only kind 'yarn'"),
        ("index_source_layer_ids", [2, 6, 7], "must be among the index sources"),
        ("candidate_source_layer_id", 2, "not come before the last of the kv sources"),
    ],
)
def test_a_config_that_the_oracle_cannot_compute_is_refused(tmp_path, key, value, message):
    config = mini_config()
    config["text_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_a_missing_tensor_is_named(tmp_path):
    for file in MINI.glob("model*"):
        shutil.copy(file, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    del index["weight_map"]["layers.4.attn.kv_norm.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(KeyError, match=r"layers\.4\.attn\.kv_norm\.weight"):
        Weights(tmp_path).plain("layers.4.attn.kv_norm.weight")


def test_the_oracle_imports_nothing_it_judges():
    files = sorted((REPOSITORY / "suites" / "numerics").glob("oracle*.py"))
    assert len(files) == 6
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in getattr(node, "names", [])]
            modules = [getattr(node, "module", None) or "", *names]
            assert not any(module.split(".")[0] == "engine" for module in modules), file
