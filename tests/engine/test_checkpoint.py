"""The checkpoint reader: slices equal the file's bytes, and every kind of bad file is refused."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from engine.checkpoint import BLOCK_BYTES, open_checkpoint
from engine.errors import CheckpointError, ConfigError
from engine.recipe import Recipe
from engine.shard import Piece, Weight, deal_ranks, rank_weights
from engine.tensors import IMAGE_BIAS, TEXT_ONLY
from tests.engine.mini_files import (
    GOLDEN,
    INDEX,
    SHARDS,
    copy_golden,
    edit_index,
    edit_shard,
    read_file,
    set_byte,
    set_tensor,
    shard_of,
    write_file,
    write_raw,
    zeros,
)

SCALE = "layers.2.attn.wo_b.scale"
NORM = "layers.2.attn_norm.weight"


@pytest.fixture
def directory(tmp_path):
    return copy_golden(tmp_path / "mini")


@pytest.fixture(scope="module")
def golden():
    with open_checkpoint(GOLDEN) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def golden_bytes():
    return {name: t for shard in SHARDS for name, t in read_file(GOLDEN / shard).items()}


def refuses(directory, pattern: str, error=CheckpointError):
    with pytest.raises(error, match=pattern):
        open_checkpoint(directory)


def as_bytes(tensor) -> np.ndarray:
    """A tensor's bytes as [rows, row bytes]."""
    dtype, shape, data = tensor
    return np.frombuffer(data, np.uint8).reshape(shape[0], -1)


@pytest.mark.parametrize("ranks", [1, 3])
def test_filled_weights_are_the_slices_of_the_files(golden, golden_bytes, ranks):
    recipe = Recipe(ranks=ranks)
    for deal in deal_ranks(golden.config, recipe):
        for weight in rank_weights(golden.config, recipe, deal):
            out = np.empty(weight.nbytes, np.uint8)
            golden.fill(weight, out)
            expected = [sliced(golden_bytes[p.source], p) for p in weight.pieces]
            assert out.tobytes() == b"".join(expected), weight.name


def sliced(tensor, piece: Piece) -> bytes:
    rows = as_bytes(tensor)[slice(*(piece.rows or (None,)))]
    if piece.columns:
        item = rows.shape[1] // tensor[1][1]
        rows = rows[:, piece.columns[0] * item : piece.columns[1] * item]
    return rows.tobytes()


QUICK = settings(max_examples=40, deadline=None)


def spans(n: int):
    """Half-open ranges within n items, empty ones included."""
    return st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda b: (min(b), max(b)))


@QUICK
@given(rows=spans(24), columns=spans(1024))
def test_any_slice_equals_the_one_of_the_safetensors_library(golden, rows, columns):
    name = "layers.1.hc_attn_fn"
    with safe_open(shard_of(GOLDEN, name), "np") as file:
        expected = file.get_slice(name)[slice(*rows), slice(*columns)]
    found = golden.read_piece(Piece(name, rows, columns))
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


@QUICK
@given(rows=spans(16))
def test_slice_of_a_vector_equals_its_items(golden, golden_bytes, rows):
    name = "layers.0.attn.attn_sink"
    expected = np.frombuffer(golden_bytes[name][2], np.float32)[slice(*rows)]
    assert np.array_equal(golden.read_piece(Piece(name, rows)), expected)


@QUICK
@given(block_bytes=st.integers(1, 5000))
def test_blocks_of_any_size_join_to_the_same_bytes(golden, block_bytes):
    piece = Piece("layers.0.attn.wo_b.weight", (3, 250), (64, 160))
    weight = Weight(piece.source, "F8_E4M3", (247, 96), (piece,))
    blocks = [block.copy() for block in golden.stream(weight, block_bytes)]
    assert max(map(len, blocks)) <= max(block_bytes, 256)
    assert np.array_equal(np.concatenate(blocks), golden.read_piece(piece).reshape(-1))


def test_blocks_are_at_most_64_mib():
    assert BLOCK_BYTES == 64 * 1024**2


def test_single_file_without_an_index_is_the_same_checkpoint(directory, golden):
    merged = {name: t for shard in SHARDS for name, t in read_file(directory / shard).items()}
    for name in (INDEX, *SHARDS):
        (directory / name).unlink()
    write_file(directory / "model.safetensors", merged)
    with open_checkpoint(directory) as single:
        assert single.fingerprint == golden.fingerprint
        assert single.size_bytes == golden.size_bytes == 12_967_492
        assert np.array_equal(single.read_piece(Piece(NORM)), golden.read_piece(Piece(NORM)))


def test_fingerprint_changes_with_weights_shapes_and_configuration(directory, golden):
    seen = {golden.fingerprint}
    set_byte(directory, NORM, 5, 0x11)
    seen.add(open_checkpoint(directory).fingerprint)
    document = json.loads((directory / "config.json").read_text())
    document["text_config"]["rope_theta"] = 20000
    (directory / "config.json").write_text(json.dumps(document))
    seen.add(open_checkpoint(directory).fingerprint)
    name = "vision.patch.weight"
    edit_shard(directory / SHARDS[0], lambda t: t.update({name: zeros("BF16", 4, 4)}))
    edit_index(directory, lambda files: files.update({name: SHARDS[0]}))
    seen.add(open_checkpoint(directory).fingerprint)
    assert len(seen) == 4


def test_files_that_the_index_does_not_name_are_no_part_of_it(directory):
    (directory / "prefill_5.safetensors").write_bytes(b"golden vectors lie beside the shards")
    open_checkpoint(directory)


def test_image_tensors_are_left_out_with_the_reason(directory):
    extra = {
        "vision.patch.weight": zeros("BF16", 4, 4),
        "layers.0.ffn.gate.bias_vl": zeros("F32", 12),
    }
    edit_shard(directory / SHARDS[2], lambda t: t.update(extra))
    edit_index(directory, lambda files: files.update(dict.fromkeys(extra, SHARDS[2])))
    assert open_checkpoint(directory).ledger(7).left_out == {
        "vision.patch.weight": TEXT_ONLY,
        "layers.0.ffn.gate.bias_vl": IMAGE_BIAS,
    }


def test_missing_tensor_is_named(directory):
    edit_shard(shard_of(directory, NORM), lambda t: t.pop(NORM))
    edit_index(directory, lambda files: files.pop(NORM))
    refuses(directory, f"lacks 1 of .* tensors: {NORM}")


def test_tensor_missing_from_its_shard_is_named_with_the_file(directory):
    file = shard_of(directory, NORM).name
    edit_shard(directory / file, lambda t: t.pop(NORM))
    refuses(directory, rf"1 tensors of the index are not in the file.*{NORM} \(in {file}\)")


def test_tensor_in_another_shard_than_the_index_says_is_named(directory):
    edit_index(directory, lambda files: files.update({NORM: SHARDS[2]}))
    refuses(directory, rf"{NORM} \(in {SHARDS[2]}\)")


def test_missing_shard_is_named(directory):
    (directory / SHARDS[1]).unlink()
    refuses(directory, f"lacks 1 files of the index: {SHARDS[1]}")


def test_shard_that_the_index_does_not_name_is_refused(directory):
    write_file(directory / "model-00004-of-00004.safetensors", {"x": zeros("F32", 1)})
    refuses(directory, "index does not name: model-00004-of-00004.safetensors")


@pytest.mark.parametrize("removed_bytes", [1, 4096, 4_000_000])
def test_truncated_shard_is_refused_with_both_sizes(directory, removed_bytes):
    path = directory / SHARDS[1]
    size = path.stat().st_size
    os.truncate(path, size - removed_bytes)
    refuses(
        directory, rf"{SHARDS[1]} is truncated: {size} bytes expected, {size - removed_bytes} f"
    )


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_shard_cut_inside_its_header_is_refused(directory, size):
    os.truncate(directory / SHARDS[0], size)
    refuses(directory, rf"{SHARDS[0]} is truncated: at least \d+ bytes expected.* {size} found")


def test_shard_with_bytes_after_its_tensors_is_refused(directory):
    with (directory / SHARDS[0]).open("ab") as file:
        file.write(b"x")
    refuses(directory, rf"{SHARDS[0]} is too long: \d+ bytes expected, \d+ found")


def test_tensor_in_two_shards_is_refused_with_both_files(directory):
    tensor = read_file(shard_of(directory, NORM))[NORM]
    edit_shard(directory / SHARDS[2], lambda t: t.update({NORM: tensor}))
    refuses(directory, f"{NORM} is in two shards: {shard_of(directory, NORM).name} and {SHARDS[2]}")


def test_tensor_twice_in_one_header_is_refused(directory):
    entry = b'"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    write_raw(directory / SHARDS[0], b"{" + entry + b"," + entry + b"}", bytes(4))
    refuses(directory, f"{SHARDS[0]}: .*'x' appears twice")


def test_tensor_twice_in_the_index_is_refused(directory):
    text = (directory / INDEX).read_text()
    line = f'"{NORM}": "{SHARDS[0]}",'
    (directory / INDEX).write_text(text.replace('"weight_map": {', '"weight_map": {' + line))
    refuses(directory, f"{INDEX}.*'{NORM}' appears twice")


def test_tensor_outside_the_index_is_refused(directory):
    edit_shard(directory / SHARDS[0], lambda t: t.update({"vision.x": zeros("F32", 1)}))
    refuses(directory, rf"1 tensors are not in the index: vision.x \(in {SHARDS[0]}\)")


def test_tensor_without_a_use_is_refused(directory):
    edit_shard(directory / SHARDS[0], lambda t: t.update({"lm_head.weight": zeros("F32", 1)}))
    edit_index(directory, lambda files: files.update({"lm_head.weight": SHARDS[0]}))
    refuses(directory, "has no use for: lm_head.weight")


@pytest.mark.parametrize(
    ("name", "tensor", "found", "expected"),
    [
        (NORM, zeros("BF16", 255), r"\[255\]", r"\[256\]"),
        (SCALE, zeros("F8_E8M0", 7, 8), r"\[7, 8\]", r"\[8, 8\]"),
        ("layers.0.attn.wq_a.weight", zeros("F8_E4M3", 256, 64), r"\[256, 64\]", r"\[64, 256\]"),
        ("layers.1.engram.embed.scale", zeros("F8_E8M0", 21, 1), r"\[21, 1\]", r"\[660, 1\]"),
    ],
)
def test_wrong_shape_is_refused_with_both_shapes(directory, name, tensor, found, expected):
    set_tensor(directory, name, tensor)
    refuses(directory, f"{name} has shape {found} in model-.*; {expected} is expected")


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        (NORM, zeros("F32", 256), "BF16"),
        (SCALE, zeros("F32", 8, 8), "F8_E8M0"),
        ("layers.0.ffn.experts.3.w1.weight", zeros("U8", 128, 128), "I8"),
        ("layers.0.attn.attn_sink", zeros("BF16", 16), "F32"),
    ],
)
def test_wrong_dtype_is_refused_with_both_dtypes(directory, name, tensor, expected):
    set_tensor(directory, name, tensor)
    refuses(directory, f"{name} is {tensor[0]} in model-.*; {expected} is expected")


def test_unlisted_dtype_is_refused(directory):
    set_tensor(directory, NORM, zeros("F16", 256))
    refuses(directory, f"{SHARDS[0]}: dtype of {NORM} is 'F16'; accepted: .*BF16")


@pytest.mark.parametrize(
    ("name", "position"),
    [(SCALE, (5, 6)), ("layers.2.ffn.experts.7.w2.scale", (200, 3)),
     ("layers.3.engram.embed.scale", (600, 0)), ("layers.0.attn.wq_a.scale", (1, 7)),
     ("mtp.1.ffn.shared_experts.w2.scale", (0, 3))],
)  # fmt: skip
def test_nan_scale_is_refused_with_tensor_and_position(directory, name, position):
    shape = read_file(shard_of(directory, name))[name][1]
    set_byte(directory, name, position[0] * shape[1] + position[1], 0xFF)
    recipe = Recipe(ranks=3)
    with open_checkpoint(directory) as checkpoint:
        weights = [
            weight
            for deal in deal_ranks(checkpoint.config, recipe)
            for weight in rank_weights(checkpoint.config, recipe, deal)
        ]
        with pytest.raises(
            CheckpointError, match=rf"{name}\[{position[0]}, {position[1]}\] is NaN"
        ):
            for weight in weights:
                checkpoint.fill(weight, np.empty(weight.nbytes, np.uint8))


@pytest.mark.parametrize("value", [0x00, 0xFE])
def test_smallest_and_largest_scales_are_read(directory, value):
    set_byte(directory, SCALE, 0, value)
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.read_piece(Piece(SCALE))[0, 0] == value


def test_file_cut_after_opening_is_refused_while_reading(directory):
    with open_checkpoint(directory) as checkpoint:
        name = list(read_file(directory / SHARDS[0]))[-1]
        path = shard_of(directory, name)
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(CheckpointError, match=f"{path.name} is truncated"):
            checkpoint.read_piece(Piece(name))


@pytest.mark.parametrize(
    ("header", "pattern"),
    [
        (b"not json", "not a JSON object"),
        (b"[]", "not a JSON object: it holds list"),
        (b"\xff\xfe{}", "not a JSON object"),
        (b"[" * 50_000 + b"]" * 50_000, "nested too deeply"),
        (b'{"x": 3}', "entry of x is 3"),
        (b'{"x": {"dtype": "F32", "shape": [1]}}', "entry of x"),
        (b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "lists of counts"),
        (b'{"x": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', "lists of counts"),
        (b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}', "lists of counts"),
        (b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "8 bytes; .* hold 4"),
        (b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "x begins at byte"),
        (b'{"x": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}', "dtype of x"),
        (b'{"__metadata__": {"format": 3}}', "no object of texts"),
    ],
)
def test_broken_header_is_refused_with_the_file(directory, header, pattern):
    write_raw(directory / SHARDS[0], header, bytes(4))
    refuses(directory, f"{SHARDS[0]}: .*{pattern}")


def test_overlapping_tensors_are_refused(directory):
    entry = '{"dtype": "F32", "shape": [2], "data_offsets": [%d, %d]}'
    header = f'{{"x": {entry % (0, 8)}, "y": {entry % (4, 12)}}}'
    write_raw(directory / SHARDS[0], header.encode(), bytes(12))
    refuses(directory, f"{SHARDS[0]}: y begins at byte")


def test_absurd_header_length_is_refused_before_it_is_read(directory):
    (directory / SHARDS[0]).write_bytes((2**63).to_bytes(8, "little") + b"{}")
    refuses(directory, "the header length reads 9223372036854775808; at most 100000000")


@pytest.mark.parametrize(
    ("text", "pattern"),
    [("{", "not a JSON object"), ("[]", "not a JSON object"), ("{}", "no weight_map"),
     ('{"weight_map": {"x": "../other/model.safetensors"}}', "plain file name"),
     ('{"weight_map": {"x": 3}}', "plain file name"), ('{"weight_map": {}}', "no weight_map")],
)  # fmt: skip
def test_broken_index_is_refused(directory, text, pattern):
    (directory / INDEX).write_text(text)
    refuses(directory, f"{INDEX}.*{pattern}")


def test_directory_without_tensors_is_refused(directory):
    for name in (INDEX, *SHARDS):
        (directory / name).unlink()
    refuses(directory, f"holds neither {INDEX} nor model.safetensors")


def test_path_that_is_no_directory_is_refused(tmp_path):
    refuses(tmp_path / "absent", "absent is no directory")


def test_engram_rows_that_do_not_follow_from_the_primes_are_refused(directory):
    document = json.loads((directory / "config.json").read_text())
    document["text_config"]["engram_num_embeddings"] = [660, 865]
    (directory / "config.json").write_text(json.dumps(document))
    refuses(directory, r"is \[660, 865\]; .* need \[660, 864\]", ConfigError)


def test_page_cache_of_a_large_checkpoint_is_dropped(directory, monkeypatch):
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: advised.append(arguments))
    with open_checkpoint(directory, drop_cache=True) as checkpoint:
        checkpoint.read_piece(Piece("embed.weight"))
    assert [a[2:] for a in advised] == [(math.prod((512, 256)) * 2, os.POSIX_FADV_DONTNEED)]
