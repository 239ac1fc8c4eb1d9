"""The package writer: nothing half-written stays, ranks must agree, memory stays small."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from engine.checkpoint import open_checkpoint
from engine.errors import PackageError
from engine.package import open_package
from engine.package_format import Manifest, file_name
from engine.package_writer import RankWriter, copy_side_files, write_package
from engine.recipe import Recipe
from engine.shard import deal_ranks
from engine.tensors import NO_DRAFTS
from engine.units import MIB
from tests.engine.mini_files import GOLDEN


@pytest.fixture(scope="module")
def checkpoint():
    with open_checkpoint(GOLDEN) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def manifest(checkpoint):
    recipe = Recipe(ranks=2)
    deals = deal_ranks(checkpoint.config, recipe)
    return Manifest(recipe, checkpoint.config, deals, checkpoint.fingerprint)


def interrupt_after(bytes_done: int):
    def progress(done: int, _total: int) -> None:
        if done >= bytes_done:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("bytes_done", [0, 1_000_000, 7_000_000])
def test_interrupted_export_leaves_no_file(checkpoint, manifest, tmp_path, bytes_done):
    with pytest.raises(KeyboardInterrupt):
        write_package(tmp_path, manifest, checkpoint, progress=interrupt_after(bytes_done))
    assert list(tmp_path.iterdir()) == []


def test_interrupted_export_keeps_the_package_that_was_there(checkpoint, manifest, tmp_path):
    write_package(tmp_path, manifest, checkpoint)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        write_package(tmp_path, manifest, checkpoint, progress=interrupt_after(8_000_000))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_file_has_its_name_only_once_sealed(checkpoint, manifest, tmp_path):
    with RankWriter(tmp_path, manifest, 0) as first, RankWriter(tmp_path, manifest, 1) as second:
        contents = [first.stream(checkpoint), second.stream(checkpoint)]
        assert {p.name for p in tmp_path.iterdir()} == {
            "model.safetensors.partial",
            "rank-1.safetensors.partial",
        }
        second.seal(contents)
        assert (tmp_path / file_name(1)).exists() and not (tmp_path / file_name(0)).exists()
    assert {p.name for p in tmp_path.iterdir()} == {"rank-1.safetensors"}


def test_leftover_of_a_killed_export_is_overwritten(checkpoint, manifest, tmp_path):
    (tmp_path / "model.safetensors.partial").write_bytes(b"x" * 20_000_000)
    write_package(tmp_path, manifest, checkpoint)
    open_package(tmp_path, 0).close()
    assert {p.name for p in tmp_path.iterdir()} == {file_name(0), file_name(1)}


def test_second_export_into_the_same_directory_is_refused(checkpoint, manifest, tmp_path):
    with RankWriter(tmp_path, manifest, 0) as writer:
        content = writer.stream(checkpoint)
        with (
            pytest.raises(PackageError, match="is being written by another export"),
            RankWriter(tmp_path, manifest, 0),
        ):
            pass
        assert writer.content == content
        assert (tmp_path / "model.safetensors.partial").stat().st_size == content.size_bytes


def test_progress_counts_to_the_whole_size(checkpoint, manifest, tmp_path):
    steps = []
    write_package(tmp_path, manifest, checkpoint, progress=lambda *step: steps.append(step))
    done = [step[0] for step in steps]
    assert done == sorted(done)
    assert steps[-1][0] == steps[-1][1] == sum(p.stat().st_size for p in tmp_path.iterdir())


def test_seal_refuses_missing_and_doubled_ranks(checkpoint, manifest, tmp_path):
    with RankWriter(tmp_path, manifest, 0) as writer:
        content = writer.stream(checkpoint)
        for contents, found in (([content], r"\[0\]"), ([content, content], r"\[0, 0\]")):
            with pytest.raises(PackageError, match=rf"ranks 0\.\.1 are expected, those of {found}"):
                writer.seal(contents)


@pytest.fixture
def streamed(checkpoint, manifest, tmp_path):
    """A streamed writer of rank 0 and the contents of both ranks."""
    with RankWriter(tmp_path, manifest, 0) as first, RankWriter(tmp_path, manifest, 1) as second:
        yield first, [first.stream(checkpoint), second.stream(checkpoint)]


def test_seal_refuses_a_rank_with_another_manifest(streamed):
    writer, (own, other) = streamed
    other = dataclasses.replace(other, manifest_sha256="0" * 64)
    with pytest.raises(PackageError, match="rank 1 exports by another manifest"):
        writer.seal([own, other])


def test_seal_refuses_a_rank_that_read_other_bytes_of_a_shared_array(streamed):
    writer, (own, other) = streamed
    other = dataclasses.replace(other, tensors=other.tensors | {"norm.weight": "0" * 64})
    with pytest.raises(PackageError, match="ranks 0 and 1 read other bytes for norm.weight"):
        writer.seal([own, other])


def test_export_without_room_on_the_disk_is_refused_with_both_sizes(
    checkpoint, manifest, tmp_path, monkeypatch
):
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PackageError, match=r"model.safetensors needs \d+ bytes; 1000 are free"):
        write_package(tmp_path, manifest, checkpoint)
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_made_is_refused(checkpoint, manifest, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PackageError, match=r"cannot write .*/file/model.safetensors.partial: "):
        write_package(tmp_path / "file", manifest, checkpoint)


def test_disk_that_fills_up_is_refused_and_left_clean(checkpoint, manifest, tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RankWriter(tmp_path, manifest, 0) as writer:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(PackageError, match="model.safetensors.partial: No space left"):
            writer.stream(checkpoint)
    assert list(tmp_path.iterdir()) == []


def test_link_under_the_temporary_name_is_not_followed(checkpoint, manifest, tmp_path):
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "model.safetensors.partial").symlink_to(tmp_path / "precious")
    with pytest.raises(PackageError, match="cannot write .*model.safetensors.partial: "):
        write_package(tmp_path, manifest, checkpoint)
    assert (tmp_path / "precious").read_text() == "kept"


def test_side_files_travel_with_their_hashes(checkpoint, manifest, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    side_files = copy_side_files(source, out, ["tokenizer.json"])
    write_package(out, dataclasses.replace(manifest, side_files=side_files), checkpoint)
    open_package(out, 0).close()
    (out / "tokenizer.json").write_text("[]")
    with pytest.raises(PackageError, match="tokenizer.json is altered: SHA-256"):
        open_package(out, 0)
    (out / "tokenizer.json").write_text("{} ")
    with pytest.raises(PackageError, match="tokenizer.json: 2 bytes expected, 3 found"):
        open_package(out, 1)
    (out / "tokenizer.json").unlink()
    open_package(out, 1).close()
    with pytest.raises(PackageError, match="tokenizer.json expected, it is missing"):
        open_package(out, 0)


@pytest.mark.parametrize("name", ["absent.json", "model.safetensors", "../x.json"])
def test_side_file_that_is_missing_or_in_the_way_is_refused(tmp_path, name):
    (tmp_path / "package").mkdir()
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "package" / "model.safetensors").write_text("")
    with pytest.raises(PackageError, match=name):
        copy_side_files(tmp_path / "package", tmp_path / "out", [name])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("size_mib", "growth_mib_max"),
    [(224, 120), pytest.param(3 * 1024, 700, marks=pytest.mark.slow)],
)
def test_export_streams_and_leaves_peak_memory_low(tmp_path, size_mib, growth_mib_max):
    command = [sys.executable, "-m", "tests.engine.export_child", str(tmp_path), str(size_mib)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=300)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["checkpoint_bytes"] >= size_mib * MIB
    assert measured["package_bytes"] >= measured["checkpoint_bytes"]
    assert measured["peak_growth_bytes"] < growth_mib_max * MIB


def test_array_in_a_package_equals_its_constant(checkpoint, manifest, tmp_path):
    fold = np.arange(6, dtype=np.int64).reshape(2, 3)
    manifest = dataclasses.replace(manifest, constants={"fold": ("I64", (2, 3))})
    write_package(tmp_path, manifest, checkpoint, {"fold": fold})
    for rank in range(2):
        with open_package(tmp_path, rank) as package:
            assert np.array_equal(package["fold"], fold)
            assert not package.weights["fold"].resident


def test_package_without_drafts_holds_no_draft_blocks(checkpoint, tmp_path):
    recipe = Recipe(ranks=2, mtp_draft_tokens=0)
    deals = deal_ranks(checkpoint.config, recipe)
    summary = checkpoint.ledger(0).summary
    manifest = Manifest(recipe, checkpoint.config, deals, checkpoint.fingerprint, left_out=summary)
    write_package(tmp_path, manifest, checkpoint)
    with open_package(tmp_path, 1) as package:
        assert not any(name.startswith("mtp.") for name in package)
        assert {line["reason"] for line in package.manifest.left_out} == {NO_DRAFTS}
