"""Random checkpoints have the release's format, depend on their seed only, and stay in scale."""

import json

import pytest
import torch
from safetensors.torch import load_file

from fixtures.checkpoints.mini_configs import contradictions
from fixtures.checkpoints.random_mini import mini_config, other_config, write_random_checkpoint
from suites.numerics.oracle import Oracle
from tests.suites.test_oracle import MINI


def stored(directory) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("model-*.safetensors"))
    return {name: t for file in files for name, t in load_file(file).items()}


def as_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: t.view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("mini"), mini_config(), 1, shards=3)


def test_mini_config_is_the_golden_config():
    assert mini_config() == json.loads((MINI / "config.json").read_text())


def test_names_shapes_and_dtypes_are_those_of_the_golden_checkpoint(written):
    ours, golden = stored(written), stored(MINI)
    assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {
        n: (t.shape, t.dtype) for n, t in golden.items()
    }


def test_index_lists_every_tensor_in_the_shard_that_holds_it(written):
    index = json.loads((written / "model.safetensors.index.json").read_text())
    held = {n: f.name for f in written.glob("model-*") for n in load_file(f)}
    golden = json.loads((MINI / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == held
    assert index["metadata"] == golden["metadata"]


def test_bytes_depend_on_the_seed_and_not_on_the_shard_count(written, tmp_path):
    one = write_random_checkpoint(tmp_path / "one", mini_config(), 1, shards=1)
    other = write_random_checkpoint(tmp_path / "other", mini_config(), 2, shards=1)
    assert as_bytes(stored(one)) == as_bytes(stored(written))
    changed, same = as_bytes(stored(other)), as_bytes(stored(one))
    assert all(changed[name] != same[name] for name in same)


def test_a_tensor_does_not_depend_on_the_rest_of_the_model(written, tmp_path):
    lean = mini_config(engram_layer_ids=[], num_nextn_predict_layers=0)
    left = as_bytes(stored(write_random_checkpoint(tmp_path, lean, 1)))
    full = as_bytes(stored(written))
    assert len(left) < len(full) and all(full[name] == left[name] for name in left)


def test_partial_blocks_have_a_scale_of_their_own(tmp_path):
    tensors = stored(write_random_checkpoint(tmp_path, other_config(), 1))
    assert tensors["layers.0.attn.wkv.weight"].shape == (48, 160)
    assert tensors["layers.0.attn.wkv.scale"].shape == (2, 5)
    assert tensors["layers.2.engram.embed.scale"].shape[1] == 2
    assert "mtp.1.norm.weight" in tensors and "mtp.2.attn_norm.weight" not in tensors
    assert "layers.6.attn.compressor.wgate.weight" not in tensors


def test_activations_are_of_the_size_the_golden_model_has(written):
    ids = list(range(5, 69))
    ours, golden = Oracle(written).prefill(ids), Oracle(MINI).prefill(ids)
    for name in ("attn_out.0", "attn_out.7", "ffn_out.0", "ffn_out.7", "resid.7", "logits"):
        assert 0.4 < ours[name].std() / golden[name].std() < 2.5, name


def test_alter_replaces_a_tensor(tmp_path):
    def zero_sinks(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor) if name.endswith("attn_sink") else tensor

    write_random_checkpoint(tmp_path, mini_config(), 1, alter=zero_sinks)
    assert not stored(tmp_path)["layers.3.attn.attn_sink"].any()


def test_overrides_recompute_what_follows_from_them():
    text = mini_config(engram_layer_ids=[3], vocab_size=300, num_nextn_predict_layers=1)[
        "text_config"
    ]
    assert text["engram_num_embeddings"] == [660]
    assert text["engram_compressed_vocab_size"] == 300
    assert text["compress_ratios"] == [0, 0, 2, 2, 2, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_sise": 3}, r"unknown config keys \['hidden_sise'\]"),
        ({"num_hidden_layers": 9}, "compress_ratios has 11 entries, expected 9 layers"),
        ({"o_groups": 3}, "num_attention_heads 16 not divisible"),
        ({"kv_source_layer_ids": [2, 3]}, "not all index sources"),
        ({"kv_source_layer_ids": [5]}, "before the first KV source 5"),
        ({"candidate_source_layer_id": 2}, "candidate source 2"),
        ({"index_source_layer_ids": [2, 5, 9]}, "outside 0..7"),
        ({"engram_layer_ids": [8]}, r"engram layers \[8\]"),
        ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 1]}, "expected zeros"),
        ({"compress_ratios": [0, 0, 2, 1, 2, 1, 1, 1, 0, 0, 0]}, "differ from those of their kv"),
        ({"moe_intermediate_size": 80}, "multiples of 32"),
        ({"qk_rope_head_dim": 34}, "odd or wider"),
        ({"num_experts_per_tok": 13}, "more experts active"),
        ({"dspark_target_layer_ids": []}, "need dspark_target_layer_ids"),
        ({"vocab_size": 3}, "below vocab_size 3"),
    ],
)
def test_a_contradictory_config_is_refused_in_words(overrides, message):
    with pytest.raises(ValueError, match=message):
        mini_config(**overrides)


def test_the_release_shapes_contradict_nothing():
    assert contradictions(mini_config()["text_config"]) == []
    assert contradictions(other_config()["text_config"]) == []


@pytest.mark.parametrize("shards", [0, 100000])
def test_an_impossible_shard_count_is_refused(tmp_path, shards):
    with pytest.raises(ValueError, match=f"shards is {shards}; expected 1 to"):
        write_random_checkpoint(tmp_path, mini_config(), 1, shards=shards)
