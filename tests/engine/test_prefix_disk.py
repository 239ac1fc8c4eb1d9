"""Blocks on disk survive a kill, stay within their limit, and are never believed unchecked."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine import prefix_disk
from engine.errors import UsageError
from engine.prefix import PAGE as PAGE_KIND
from engine.prefix_disk import PrefixDisk
from fixtures.toy_core import ToyCore
from tests.engine.serving import PAGE, SHAPE, alone, ask, build, prompt, run

IDS = prompt(1, 5 * PAGE + 3)
KEY = b"k" * 32
LARGE = 10**9


@pytest.fixture
def disk(tmp_path):
    store = PrefixDisk(tmp_path / "cache", LARGE, "test")
    yield store
    store.close()


def serve(directory, limit_bytes=LARGE, identity="test", ids=IDS, meddle=None):
    """A server's life: start over a directory, answer one request, end; what it gave and found."""
    store = PrefixDisk(directory, limit_bytes, identity)
    scheduler = build(ToyCore(**SHAPE), identity=identity, disk=store)
    if meddle:
        meddle(store)
    (sink,) = run(scheduler, ask(ids))
    store.flush()
    store.close()
    assert sink.ids == alone(ids, 8)
    return sink.cached, store


def test_a_hit_after_a_restart_gives_the_same_tokens(tmp_path):
    assert serve(tmp_path)[0] == 0
    cached, store = serve(tmp_path)
    assert cached == 5 * PAGE
    assert store.stats.blocks["read"] == 6 and not any(store.stats.errors.values())


def test_memory_and_disk_work_together(tmp_path):
    store = PrefixDisk(tmp_path, LARGE, "test")
    core = ToyCore(**{**SHAPE, "pages": 10})
    scheduler = build(core, limit_bytes=10**6, disk=store)
    for n in (1, 2, 3, 1):
        (sink,) = run(scheduler, ask(prompt(n, 50)))
        assert sink.ids == alone(prompt(n, 50), 8)
    assert sink.cached == 6 * PAGE
    assert scheduler._prefix.stats.hit_tokens["disk"] == 6 * PAGE
    (sink,) = run(scheduler, ask(prompt(1, 50)))
    assert scheduler._prefix.stats.hit_tokens["memory"] == 6 * PAGE
    store.close()


def test_a_block_comes_back_as_it_was_put(disk):
    disk.put(PAGE_KIND, KEY, b"content")
    assert disk.get(PAGE_KIND, KEY) == b"content"
    disk.flush()
    assert disk.get(PAGE_KIND, KEY) == b"content"
    assert not disk.has("window", KEY)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "one bit": (flip, "corrupt"),
    "cut off": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "corrupt"),
    "empty": (lambda p: p.write_bytes(b""), "corrupt"),
    "longer": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "corrupt"),
    "another file": (lambda p: p.write_bytes(b"#!/bin/sh\n" * 50), "corrupt"),
    "missing": (lambda p: p.unlink(), "unreadable"),
    "a directory": (lambda p: (p.unlink(), p.mkdir()), "unreadable"),
}


@pytest.mark.parametrize("kind", ["page", "window"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_block_is_noticed_and_costs_only_the_hit(tmp_path, damage, kind):
    act, error = DAMAGES[damage]
    serve(tmp_path)

    def meddle(store):
        for path in tmp_path.glob(f"*.{kind}.block"):
            act(path)

    cached, store = serve(tmp_path, meddle=meddle)
    assert cached == 0
    assert store.stats.errors[error] > 0
    if damage != "a directory":
        assert serve(tmp_path)[0] == 5 * PAGE  # written anew


def test_one_damaged_page_in_the_middle_leaves_the_pages_before_it(tmp_path):
    serve(tmp_path)
    store = PrefixDisk(tmp_path, LARGE, "test")
    scheduler = build(ToyCore(**SHAPE), disk=store)
    key = scheduler.submit(ask(IDS))
    scheduler._seats.reusable_keys(key)
    flip(tmp_path / f"{key.keys[3].hex()}.page.block")
    scheduler.step()
    assert key.cached_tokens == 3 * PAGE
    store.close()


@pytest.mark.parametrize("identity", ["another model", "the same at four ranks"])
def test_another_packages_blocks_are_never_used(tmp_path, identity):
    serve(tmp_path, identity=identity)
    assert serve(tmp_path)[0] == 0


def test_a_renamed_foreign_block_is_found_out(tmp_path, disk):
    foreign = PrefixDisk(tmp_path / "foreign", LARGE, "another model")
    foreign.put("page", KEY, b"content")
    foreign.close()
    source = next((tmp_path / "foreign").glob("*.block"))
    disk.put("page", KEY, b"mine")
    disk.flush()
    shutil.copy(source, tmp_path / "cache" / source.name)
    assert disk.get("page", KEY) is None
    assert disk.stats.errors["foreign"] == 1
    assert not disk.has("page", KEY)


def test_a_block_under_another_key_is_found_out(tmp_path, disk):
    for key in (KEY, b"o" * 32):
        disk.put("page", key, b"content of " + key)
    disk.flush()
    mine, other = (tmp_path / "cache" / f"{k.hex()}.page.block" for k in (KEY, b"o" * 32))
    shutil.copy(other, mine)
    assert disk.get("page", KEY) is None


def test_the_limit_holds_and_the_oldest_block_goes_first(tmp_path):
    store = PrefixDisk(tmp_path, 900, "test")
    keys = [bytes([n]) * 32 for n in range(4)]
    for number, key in enumerate(keys):
        store.put("page", key, b"x" * 60)
        store.flush()
        if number == 2:
            store.get("page", keys[0])
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.block"))
    assert store.stats.size_bytes == on_disk <= 900
    assert store.has("page", keys[0]) and not store.has("page", keys[1])
    assert store.stats.blocks["dropped"] == 4 - len(list(tmp_path.glob("*.block"))) > 0
    store.close()


def test_the_order_of_use_and_the_limit_hold_across_a_restart(tmp_path):
    store = PrefixDisk(tmp_path, LARGE, "test")
    keys = [bytes([n]) * 32 for n in range(4)]
    for number, key in enumerate(keys):
        store.put("page", key, b"x" * 60)
        store.flush()
        path = tmp_path / f"{key.hex()}.page.block"
        os.utime(path, ns=(number, number))
    store.get("page", keys[0])
    store.close()
    size = path.stat().st_size
    again = PrefixDisk(tmp_path, 2 * size, "test")
    assert [again.has("page", key) for key in keys] == [True, False, False, True]
    again.close()


def test_a_block_larger_than_the_limit_is_not_written(tmp_path):
    store = PrefixDisk(tmp_path, 100, "test")
    store.put("page", KEY, b"x" * 200)
    store.flush()
    assert not store.has("page", KEY) and store.stats.blocks["skipped"] == 1
    store.close()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EIO, "unwritable")]
)
def test_a_disk_that_refuses_to_write_costs_only_hits(tmp_path, monkeypatch, number, kind):
    def refuse(path, block):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    cached, store = serve(tmp_path)
    assert cached == 0 and store.stats.errors[kind] > 0
    assert not list(tmp_path.glob("*.block")) + list(tmp_path.glob("*.part"))
    monkeypatch.undo()
    serve(tmp_path)
    assert serve(tmp_path)[0] == 5 * PAGE


def test_a_directory_that_vanishes_costs_only_hits(tmp_path):
    serve(tmp_path / "cache")

    def meddle(store):
        shutil.rmtree(tmp_path / "cache")

    cached, store = serve(tmp_path / "cache", meddle=meddle)
    assert cached == 0 and store.stats.errors["unreadable"] > 0


def test_a_writer_that_lags_skips_blocks_instead_of_holding_memory(disk, monkeypatch):
    monkeypatch.setattr(prefix_disk, "_PENDING_BYTES_MAX", 100)
    gate, write = threading.Event(), disk._write
    monkeypatch.setattr(disk, "_write", lambda *block: gate.wait(10) and write(*block))
    for number in range(3):
        disk.put("page", bytes([number]) * 32, b"x" * 60)
    gate.set()
    disk.flush()
    assert [disk.has("page", bytes([number]) * 32) for number in range(3)] == [True, False, False]
    assert disk.stats.blocks["skipped"] == 2
    disk.put("page", bytes([2]) * 32, b"x" * 200)
    disk.flush()
    assert disk.has("page", bytes([2]) * 32)


def test_two_servers_may_not_share_a_directory(tmp_path, disk):
    with pytest.raises(UsageError, match=rf"process {os.getpid()} on \S+ is using"):
        PrefixDisk(tmp_path / "cache", LARGE, "test")


def test_a_path_that_is_no_directory_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="prefix-cache-disk is .*file"):
        PrefixDisk(tmp_path / "file", LARGE, "test")


def test_unfinished_files_of_a_killed_process_are_swept_up(tmp_path):
    (tmp_path / "abc.page.block.part").write_bytes(b"half")
    store = PrefixDisk(tmp_path, LARGE, "test")
    assert not list(tmp_path.glob("*.part"))
    store.close()


KILLED = """
import os, sys
sys.path.insert(0, os.getcwd())
from tests.engine.test_prefix_disk import *
store = PrefixDisk(sys.argv[1], LARGE, "test")
scheduler = build(ToyCore(**SHAPE), disk=store)
run(scheduler, ask(IDS))
store.flush()
print("answered", flush=True)
for n in range(10**9):
    store.put("page", n.to_bytes(32, "big"), bytes(100_000))
"""


def test_the_cache_survives_kill_9_and_its_lock_does_not(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "answered\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    cached, store = serve(tmp_path)
    assert cached == 5 * PAGE and not any(store.stats.errors.values())


def test_a_header_of_another_version_is_foreign(disk, monkeypatch):
    monkeypatch.setattr(prefix_disk, "_VERSION", 0)
    disk.put("page", KEY, b"content")
    disk.flush()
    monkeypatch.undo()
    assert disk.get("page", KEY) is None and disk.stats.errors["foreign"] == 1
