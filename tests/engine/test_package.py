"""Packages: what is written is what is read, and every altered or foreign file is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from engine import package_format
from engine.checkpoint import open_checkpoint
from engine.errors import PackageError
from engine.package import check_graphs, open_package, read_manifest, verify_package
from engine.package_format import (
    Manifest,
    code_version,
    content_from_json,
    file_name,
    manifest_from_json,
)
from engine.package_writer import RankWriter, write_package
from engine.recipe import Recipe
from engine.shard import deal_ranks
from engine.tensorfile import DTYPE_BYTES
from tests.engine.mini_files import GOLDEN, flip_byte, write_file, zeros

FOLD = np.arange(512, dtype=np.int32)


@pytest.fixture(scope="module")
def checkpoint():
    with open_checkpoint(GOLDEN) as checkpoint:
        yield checkpoint


def manifest_for(checkpoint, **choices) -> Manifest:
    recipe = Recipe(**choices)
    return Manifest(
        recipe,
        checkpoint.config,
        deal_ranks(checkpoint.config, recipe),
        checkpoint.fingerprint,
        graphs={"prefill": "ab" * 32},
        memory_map={"version": "memmap/1", "ranks": []},
        left_out=checkpoint.ledger(recipe.mtp_draft_tokens).summary,
        constants={"engram.fold": ("I32", (512,))},
    )


@pytest.fixture(scope="module")
def written(checkpoint, tmp_path_factory):
    """A package at three ranks, not to be altered."""
    directory = tmp_path_factory.mktemp("package")
    write_package(directory, manifest_for(checkpoint), checkpoint, {"engram.fold": FOLD})
    return directory


@pytest.fixture
def package(written, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(written, tmp_path / "package"))


def refuses(pattern: str, path, rank: int = 0, **options):
    with pytest.raises(PackageError, match=pattern):
        open_package(path, rank, **options).close()


@pytest.mark.parametrize("rank", range(3))
def test_arrays_read_back_as_the_checkpoint_slices(checkpoint, written, rank):
    with open_package(written, rank) as package:
        for name, weight in package.weights.items():
            if name == "engram.fold":
                continue
            expected = np.empty(weight.nbytes, np.uint8)
            checkpoint.fill(weight, expected)
            out = np.empty(weight.nbytes, np.uint8)
            package.read_into(name, out)
            assert np.array_equal(out, expected), name
            assert package[name].tobytes() == expected.tobytes(), name
            assert package[name].shape == weight.shape
        assert np.array_equal(package["engram.fold"], FOLD)
        assert package.manifest == manifest_for(checkpoint)


def test_mapped_arrays_are_read_only(written):
    with open_package(written, 0) as package, pytest.raises(ValueError, match="read-only"):
        package["norm.weight"][0] = 1


def test_safetensors_library_reads_the_files(written):
    with open_package(written, 1) as package, safe_open(package.header.path, "np") as file:
        assert set(file.keys()) == set(package)
        found = file.get_tensor("layers.0.attn.attn_sink")
        assert np.array_equal(found, package["layers.0.attn.attn_sink"])


def test_arrays_are_aligned_as_far_as_a_file_without_gaps_allows(written):
    for rank in range(3):
        with open_package(written, rank) as package:
            for stored in package.header.container.tensors.values():
                unit = 256 if stored.nbytes % 256 == 0 else DTYPE_BYTES[stored.dtype]
                assert stored.offset % unit == 0, stored


def test_same_export_gives_the_same_bytes(checkpoint, written, tmp_path):
    write_package(tmp_path, manifest_for(checkpoint), checkpoint, {"engram.fold": FOLD})
    for rank in range(3):
        assert (tmp_path / file_name(rank)).read_bytes() == (written / file_name(rank)).read_bytes()


def test_ranks_that_export_apart_write_the_same_files(checkpoint, written, tmp_path):
    manifest, contents = manifest_for(checkpoint), []
    for rank in range(3):
        with RankWriter(tmp_path / str(rank), manifest, rank, {"engram.fold": FOLD}) as writer:
            contents.append(writer.stream(checkpoint))
    contents = [content_from_json(json.loads(json.dumps(c.to_json()))) for c in contents]
    for rank in (2, 1, 0):
        with RankWriter(tmp_path / "all", manifest, rank, {"engram.fold": FOLD}) as writer:
            writer.stream(checkpoint)
            sealed = writer.seal(contents[::-1])
        assert (tmp_path / "all" / file_name(rank)).read_bytes() == (
            written / file_name(rank)
        ).read_bytes()
    assert open_package(written, 0).package_hash == sealed


def test_package_hash_follows_recipe_weights_and_code_but_not_the_memory_floor(
    checkpoint, tmp_path
):
    def hash_of(manifest: Manifest) -> str:
        return write_package(tmp_path, manifest, checkpoint, {"engram.fold": FOLD})

    base = manifest_for(checkpoint)
    changed = [
        base,
        manifest_for(checkpoint, scratch="none"),
        manifest_for(checkpoint, ranks=2),
        dataclasses.replace(base, checkpoint="0" * 64),
        dataclasses.replace(base, code_version="0.1.0+other"),
    ]
    assert len({hash_of(manifest) for manifest in changed}) == len(changed)
    assert hash_of(manifest_for(checkpoint, host_memory_floor_bytes=1)) == hash_of(base)


def test_manifest_survives_json(checkpoint):
    manifest = manifest_for(checkpoint)
    assert manifest_from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def test_code_version_names_the_release_and_the_sources():
    assert code_version().startswith("0.1.0+") and len(code_version()) == len("0.1.0+") + 12


def test_flipped_byte_anywhere_in_the_header_is_refused(package):
    path = package / file_name(1)
    with open_package(package, 1, verify=False) as opened:
        head_bytes = 8 + len(opened.header.container.header)
    positions = [*range(120), *range(120, head_bytes, 997), head_bytes - 1]
    for position in positions:
        flip_byte(path, position)
        refuses(file_name(1), package, 1, verify=False)
        flip_byte(path, position)
    open_package(package, 1).close()


def test_flipped_byte_anywhere_in_the_data_is_refused_with_the_array(package):
    path, dice = package / file_name(2), random.Random(7)
    with open_package(package, 2, verify=False) as opened:
        stored = [t for t in opened.header.container.tensors.values() if t.nbytes]
    for tensor in dice.sample(stored, 25) + stored[:1] + stored[-1:]:
        for position in {0, tensor.nbytes - 1, dice.randrange(tensor.nbytes)}:
            flip_byte(path, tensor.offset + position, 0x80)
            refuses(f"{file_name(2)}: {tensor.name} is altered: SHA-256 .* expected", package, 2)
            flip_byte(path, tensor.offset + position, 0x80)
    open_package(package, 2).close()


def test_resident_array_is_refused_while_it_is_read(package):
    with open_package(package, 0, verify=False) as opened:
        stored = opened.header.container.tensors["norm.weight"]
    flip_byte(package / file_name(0), stored.offset)
    with (
        open_package(package, 0, on_read=True) as opened,
        pytest.raises(PackageError, match="norm.weight is altered"),
    ):
        opened.read_into("norm.weight", np.empty(stored.nbytes, np.uint8))


def test_table_on_disk_is_refused_on_opening_even_when_the_rest_waits(package):
    with open_package(package, 0, verify=False) as opened:
        stored = opened.header.container.tensors["layers.1.engram.embed.weight"]
    flip_byte(package / file_name(0), stored.offset + 77)
    refuses("layers.1.engram.embed.weight is altered", package, on_read=True)


def resign(path: Path, change) -> None:
    """Alter the header's metadata in place and give the header a hash that fits again."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    document = json.loads(data[8:start])
    change(document["__metadata__"])
    document["__metadata__"]["header_sha256"] = "0" * 64
    text = json.dumps(document, separators=(",", ":")).encode().ljust(start - 8)
    head = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(head).hexdigest().encode()
    path.write_bytes(head.replace(b"0" * 64, digest, 1) + data[start:])


def drop_recipe(metadata: dict) -> None:
    manifest = json.loads(metadata["manifest"])
    del manifest["recipe"]
    metadata["manifest"] = json.dumps(manifest)


def forge_tensor_hash(metadata: dict) -> None:
    tensors = json.loads(metadata["tensors"])
    tensors["norm.weight"]["sha256"] = "1" * 64
    metadata["tensors"] = json.dumps(tensors, separators=(",", ":"))


def forge_size(metadata: dict) -> None:
    contents = json.loads(metadata["contents"])
    contents[1]["size_bytes"] -= 1
    metadata["contents"] = json.dumps(contents, separators=(",", ":"))


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda m: None, None),
        (lambda m: m.update(package_hash="1" * 64), "package hash .* expected, 1111"),
        (forge_tensor_hash, "content hash .* expected"),
        (forge_size, r"size in bytes \d+ expected, \d+ found"),
        (drop_recipe, "the manifest cannot be read: KeyError"),
        (lambda m: m.update(manifest="3"), "the manifest cannot be read"),
        (lambda m: m.update(extra="x"), "metadata .* expected, .*'extra'"),
        (lambda m: m.pop("rank"), "metadata .* expected"),
        (lambda m: m.update(rank="one"), "the manifest cannot be read: ValueError"),
        (lambda m: m.update(rank="3"), r"rank 0\.\.2 expected, 3 found"),
        (lambda m: m.update(contents="[]"), r"package hash .* expected"),
        (lambda m: m.update(contents="[3]"), "the manifest cannot be read"),
    ],
)
def test_header_that_contradicts_itself_is_refused_though_its_hash_fits(package, change, pattern):
    resign(package / file_name(1), change)
    if pattern is None:
        open_package(package, 1).close()
    else:
        refuses(f"rank-1.safetensors: {pattern}", package, 1)


@pytest.mark.parametrize("kept", [0, 7, 1000, -1, -4096])
def test_truncated_file_is_refused_with_both_sizes(package, kept):
    path = package / file_name(1)
    size = kept if kept >= 0 else path.stat().st_size + kept
    os.truncate(path, size)
    refuses(rf"{file_name(1)} is truncated: .*\d+ bytes expected.*, {size} found", package, 1)


def test_longer_file_is_refused(package):
    with (package / file_name(0)).open("ab") as file:
        file.write(b"\0")
    refuses("model.safetensors is too long", package)


def test_file_cut_after_opening_is_refused_while_reading(package):
    with open_package(package, 1) as opened:
        os.truncate(package / file_name(1), 200_000)
        with pytest.raises(PackageError, match="rank-1.safetensors is truncated"):
            opened.check()


def test_package_of_another_format_is_refused_with_both_versions(checkpoint, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(package_format, "FORMAT", "package/2")
        write_package(tmp_path, manifest_for(checkpoint), checkpoint, {"engram.fold": FOLD})
    refuses("model.safetensors: format 'package/1' expected, 'package/2' found", tmp_path)


def test_package_of_another_engine_is_refused_with_both_versions(checkpoint, tmp_path):
    manifest = dataclasses.replace(manifest_for(checkpoint), code_version="9.0.0+0123456789ab")
    write_package(tmp_path, manifest, checkpoint, {"engram.fold": FOLD})
    refuses("model.safetensors: written by engine 9.0.0; this is 0.1.0", tmp_path)


def test_file_of_another_rank_is_refused_with_both_ranks(package):
    shutil.copyfile(package / file_name(1), package / file_name(2))
    refuses("rank-2.safetensors: rank 2 expected, rank 1 found", package, 2)


def test_missing_rank_is_refused_with_what_is_there(package):
    (package / file_name(2)).unlink()
    refuses("rank-2.safetensors expected for rank 2; .* holds model.*, rank-1.*", package, 2)
    refuses("rank-3.safetensors expected for rank 3", package, 3)


def test_file_of_another_recipe_is_refused_with_the_choice(package):
    refuses(
        "recipe prefill_chunk 64 expected, 4096 found", package, recipe=Recipe(prefill_chunk=64)
    )
    open_package(package, 0, recipe=Recipe()).close()


def test_file_from_another_export_beside_the_first_one_is_refused(checkpoint, package, tmp_path):
    other = tmp_path / "other"
    write_package(
        other, manifest_for(checkpoint, scratch="none"), checkpoint, {"engram.fold": FOLD}
    )
    shutil.copyfile(other / file_name(1), package / file_name(1))
    refuses("rank-1.safetensors: package .* expected as in model.safetensors, .* found", package, 1)


def test_rank_file_alone_on_its_host_opens(package):
    (package / file_name(0)).unlink()
    (package / file_name(2)).unlink()
    open_package(package, 1).close()


def test_ordinary_safetensors_file_is_refused(tmp_path):
    write_file(tmp_path / file_name(0), {"x": zeros("F32", 1)})
    refuses("format 'package/1' expected, None found", tmp_path)


def test_path_without_a_package_is_refused(tmp_path):
    refuses("a package directory or its model.safetensors expected", tmp_path / "absent")
    refuses("expected for rank 0; .* holds no such file", tmp_path)


def test_model_file_names_its_directory(written):
    assert read_manifest(written / file_name(0)) == read_manifest(written)


def test_array_that_the_manifest_does_not_call_for_is_refused(checkpoint, tmp_path, monkeypatch):
    write_package(tmp_path, manifest_for(checkpoint), checkpoint, {"engram.fold": FOLD})
    fewer = lambda *arguments: rank_weights(*arguments)[1:]  # noqa: E731
    rank_weights = package_format.rank_weights
    monkeypatch.setattr(package_format, "rank_weights", fewer)
    refuses(r"model.safetensors: tensor embed.weight None expected, \('BF16'", tmp_path)


def test_other_graphs_are_refused_by_name(written):
    with open_package(written, 0) as opened:
        check_graphs(opened, {"prefill": "ab" * 32})
        with pytest.raises(PackageError, match="graph prefill cd.* expected, ab.* found"):
            check_graphs(opened, {"prefill": "cd" * 32})
        with pytest.raises(PackageError, match="graph decode cd.* expected, None found"):
            check_graphs(opened, {"prefill": "ab" * 32, "decode": "cd" * 32})


def test_whole_directory_is_verified_with_progress(package):
    steps = []
    verified = verify_package(package, lambda done, total: steps.append((done, total)))
    assert verified.checked == ("model.safetensors", "rank-1.safetensors", "rank-2.safetensors")
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1]
    (package / file_name(1)).unlink()
    assert verify_package(package).elsewhere == ("rank-1.safetensors",)
    flip_byte(package / file_name(2), (package / file_name(2)).stat().st_size - 1)
    with pytest.raises(PackageError, match="rank-2.safetensors: .* is altered"):
        verify_package(package)
