"""Exports over several ranks: who writes what, what is checked before, and what failure leaves."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from engine.checkpoint import open_checkpoint
from engine.errors import (
    CheckpointError,
    MemoryFloorError,
    PackageError,
    PeerLostError,
    RendezvousError,
)
from engine.export import (
    available_bytes,
    export_options,
    export_package,
    find_checkpoint,
    join_export,
    refuse_existing,
)
from engine.package import open_package, read_manifest, verify_package
from engine.recipe import Recipe
from engine.rendezvous import meet
from engine.units import GIB, MIB

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "fixtures" / "goldens" / "mini"
RECIPE = Recipe(max_concurrency=2, mtp_draft_tokens=0, prefill_chunk=8, scratch="none")


def silent(phase, done, total):
    return


@pytest.fixture
def address():
    from engine.cli.options import free_address

    return free_address()


class Export:
    """All ranks of an export in threads; `results` by rank are what each returned or raised."""

    def __init__(self, address, output, recipe=RECIPE):
        self.address, self.output, self.recipe = address, output, recipe
        self.results = {}

    def run(self, checkpoint=GOLDEN, join=None, memory=None):
        """join: per rank, keyword arguments of its half; memory: per rank, bytes available."""
        join, memory = join or {}, memory or {}
        threads = [
            threading.Thread(target=self._catch, args=(rank, checkpoint, join, memory))
            for rank in range(self.recipe.ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return self.results

    def _catch(self, rank, checkpoint, join, memory):
        def read():
            return memory.get(rank, 100 * GIB)

        def come():
            options = export_options("cpu", self.recipe.ranks, "test")
            return meet(rank, self.recipe.ranks, self.address, options, "s", 10)

        try:
            if rank == 0:
                self.results[0] = export_package(
                    checkpoint, self.recipe, self.output, come, silent, read
                )
            else:
                with come() as meeting:
                    self.results[rank] = join_export(
                        meeting, silent, read_memory=read, **join.get(rank, {})
                    )
        except (PeerLostError, RendezvousError, PackageError, MemoryFloorError) as error:
            self.results[rank] = error
        except CheckpointError as error:
            self.results[rank] = error


def test_every_rank_writes_its_own_file_and_a_second_export_has_the_same_hash(address, tmp_path):
    output = tmp_path / "package"
    results = Export(address, output).run()
    files = ["model.safetensors", "rank-1.safetensors", "rank-2.safetensors"]
    assert [results[rank].file.name for rank in (1, 2)] == files[1:]
    assert sorted(p.name for p in output.iterdir()) == files
    verified = verify_package(output)
    assert verified.checked == tuple(files)
    assert verified.package_hash == results[0].package_hash
    again = Export(address, tmp_path / "again").run()
    assert again[0].package_hash == results[0].package_hash


def test_the_package_holds_the_map_the_fold_and_what_was_left_out(address, tmp_path):
    results = Export(address, tmp_path, RECIPE.with_ranks(1)).run()
    manifest = read_manifest(tmp_path)
    assert manifest.memory_map == results[0].planned.memory_map.to_json()
    assert manifest.graphs == results[0].planned.graph_digests
    assert any(entry["reason"].startswith("the recipe has no draft") for entry in manifest.left_out)
    with open_package(tmp_path, 0) as package:
        assert package["engram.fold"].tolist() == list(range(512))


def test_a_rank_that_cannot_see_the_checkpoint_leaves_its_file_to_rank_0(
    address, tmp_path, monkeypatch
):
    private = tmp_path / "private"
    shutil.copytree(GOLDEN, private)
    from engine import export

    real = export.open_checkpoint

    def open_elsewhere(directory, *rest):
        if threading.current_thread() is not main and Path(directory) == private:
            raise CheckpointError(f"{directory} is no directory")
        return real(directory, *rest)

    run = Export(address, tmp_path / "package")
    main = threading.Thread(target=run._catch, args=(0, private, {}, {}))
    monkeypatch.setattr(export, "open_checkpoint", open_elsewhere)
    others = [threading.Thread(target=run._catch, args=(r, private, {}, {})) for r in (1, 2)]
    for thread in (main, *others):
        thread.start()
    for thread in (main, *others):
        thread.join(60)
    assert run.results[1].file is None and "is no directory" in run.results[1].reason
    assert len(verify_package(tmp_path / "package").checked) == 3


def test_a_checkpoint_chosen_by_hand_must_be_that_of_rank_0(address, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(GOLDEN, other)
    with open_checkpoint(GOLDEN) as original:
        norm = original.tensors["norm.weight"]
    shard = other / norm.path.name
    content = bytearray(shard.read_bytes())
    content[norm.offset] ^= 1
    shard.write_bytes(content)
    results = Export(address, tmp_path / "p").run(join={2: {"checkpoint_directory": other}})
    assert "is another checkpoint" in str(results[2])
    assert isinstance(results[0], PeerLostError) and "another checkpoint" in str(results[0])
    assert not (tmp_path / "p" / "model.safetensors").exists()


def test_too_little_memory_here_is_refused_before_anything_with_both_figures(address, tmp_path):
    def never():
        raise AssertionError("ranks met")

    with pytest.raises(MemoryFloorError) as caught:
        export_package(
            GOLDEN,
            Recipe(host_memory_floor_bytes=12_288 * MIB),
            tmp_path / "p",
            never,
            silent,
            lambda: 12_269 * MIB,
        )
    assert "before compilation: 12,269 MiB available, 12,288 MiB required" in str(caught.value)
    assert not (tmp_path / "p").exists()


def test_too_little_memory_of_another_rank_stops_all_before_any_file(address, tmp_path):
    results = Export(address, tmp_path / "p").run(memory={1: 12_269 * MIB - 8 * GIB})
    assert isinstance(results[0], MemoryFloorError)
    assert "rank 1 before writing: 4,077 MiB available, 8,192 MiB required" in str(results[0])
    for rank in (1, 2):
        assert "rank 0 is gone: MemoryFloorError" in str(results[rank])
    assert list(tmp_path.rglob("*.safetensors*")) == []


def test_a_failed_export_leaves_no_partial_file(address, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    output = tmp_path / "p"
    results = Export(address, output).run(join={1: {"output": blocked / "sub"}})
    assert isinstance(results[1], PackageError)
    for rank in (0, 2):
        assert "rank 1 is gone: PackageError" in str(results[rank])
    assert list(output.glob("*")) == []


def test_a_bad_checkpoint_is_refused_before_ranks_meet(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "c")
    next((tmp_path / "c").glob("model-00002-*.safetensors")).unlink()

    def never():
        raise AssertionError("ranks met")

    with pytest.raises(CheckpointError, match="model-00002"):
        export_package(tmp_path / "c", RECIPE, tmp_path / "p", never, silent, lambda: 100 * GIB)


def test_an_existing_package_is_not_replaced_unasked(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(PackageError, match="--overwrite"):
        refuse_existing(tmp_path, overwrite=False)
    refuse_existing(tmp_path, overwrite=True)


def test_a_name_is_found_in_the_local_cache_and_never_downloaded(tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc\n")
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    assert find_checkpoint("org/name", environ) == snapshot
    with pytest.raises(CheckpointError, match="looked at other/name and .*models--other--name"):
        find_checkpoint("other/name", environ)


def test_the_memory_reading_is_that_of_this_host():
    assert 0 < available_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
