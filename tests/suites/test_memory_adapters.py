"""Adapters: what other engines' dumps become, what they cannot show, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.memmap import MemoryMap, RankMap
from suites.memory.adapters import from_inspect_json, from_minimalloc_csv, read_foreign
from suites.memory.checks import check_document, check_map

KIB = 1024


def checks(adapted) -> list[str]:
    return [entry.check for entry in adapted.not_checked]


# The seed's flare inspect


def test_bytes_alone_make_a_map():
    document = {"ranks": [{"allocations": [{"nbytes": 5}, {"nbytes": 7}]}]}
    adapted = from_inspect_json(document)
    assert [rank.fixed_bytes for rank in adapted.memory_map.ranks] == [12]
    assert checks(adapted) == [
        "inventory rows",
        "overlap, bounds, alignment",
        "size from shape",
        "temporaries",
    ]
    assert check_document(adapted.memory_map.to_json()).is_clean


def test_what_an_allocation_says_is_kept():
    row = {
        "name": "embed",
        "category": "weights",
        "nbytes": 512,
        "arena": "weights",
        "offset": 256,
        "alignment": 256,
        "dtype": "bf16",
        "shape": [2, 128],
        "colour": "red",
    }
    adapted = from_inspect_json({"ranks": [{"rank": 0, "allocations": [row]}]})
    (allocation,) = adapted.memory_map.ranks[0].allocations
    assert (allocation.name, allocation.offset, allocation.shape) == ("embed", 256, (2, 128))
    assert checks(adapted) == ["temporaries"]


def test_placed_allocations_are_checked_for_overlap():
    rows = [{"nbytes": 64, "arena": "x", "offset": at, "name": str(at)} for at in (0, 32)]
    adapted = from_inspect_json({"ranks": [{"allocations": rows}]})
    assert check_map(adapted.memory_map).names == ("allocations-overlap",)


def test_a_map_of_our_own_is_passed_on(tmp_path):
    memory_map = MemoryMap({}, {}, (RankMap(0, (), ()),))
    path = tmp_path / "map.json"
    path.write_text(json.dumps(memory_map.to_json()))
    assert read_foreign(path).memory_map == memory_map


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ([], "a list `ranks` is expected; found []"),
        ({"ranks": 3}, "a list `ranks` is expected"),
        ({"ranks": [{}]}, r"ranks\[0\]: a list `allocations` is expected"),
        ({"ranks": [{"allocations": [{}]}]}, r"allocations\[0\]: `nbytes` of 0 or more"),
        ({"ranks": [{"allocations": [{"nbytes": -1}]}]}, "'nbytes': -1"),
        ({"ranks": [{"allocations": [{"nbytes": True}]}]}, "'nbytes': True"),
        ({"ranks": [{"allocations": [{"nbytes": "1"}]}]}, "'nbytes': '1'"),
    ],
)
def test_a_dump_of_another_form_is_refused_with_the_place(document, text):
    with pytest.raises(UsageError, match=text.replace("[]", r"\[\]")):
        from_inspect_json(document)


# torch allocator snapshots


def block(size: int, state: str = "active_allocated", **more) -> dict:
    return {"size": size, "requested_size": size, "state": state, "frames": [], **more}


def segment(address: int, blocks: list[dict], **more) -> dict:
    total = sum(b["size"] for b in blocks)
    return {
        "device": 0,
        "address": address,
        "total_size": total,
        "stream": 0,
        "blocks": blocks,
        **more,
    }


def snapshot_file(path: Path, segments: list, traces: list | None = None) -> Path:
    value = {"segments": segments, "device_traces": traces or [[]], "allocator_settings": {}}
    path.write_bytes(pickle.dumps(value))
    return path


def test_a_snapshot_becomes_one_arena_per_segment(tmp_path):
    segments = [
        segment(4096, [block(512), block(1536, "inactive")]),
        segment(65536, [block(1024)], segment_pool_id=(0, 3)),
        segment(4096, [block(512, address=4096)], device=1),
    ]
    adapted = read_foreign(snapshot_file(tmp_path / "s.pickle", segments))
    rank0, rank1 = adapted.memory_map.ranks
    assert rank0.inventory_bytes["allocator_slack"] == 1536
    assert rank0.inventory_bytes["graph_capture_pool"] == 1024
    assert rank0.inventory_bytes["other_owned_tensors"] == 512
    assert (rank0.fixed_bytes, rank1.fixed_bytes) == (3072, 512)
    assert [(a.arena, a.offset) for a in rank0.allocations] == [
        ("segment.0", 0),
        ("segment.0", 512),
        ("segment.1", 0),
    ]
    assert checks(adapted) == ["lives", "inventory rows", "memory outside the allocator"]
    assert check_map(adapted.memory_map, ranks_within_bytes=None).is_clean


def event(action: str, addr: int, size: int = 512, stream: int = 0) -> dict:
    return {"action": action, "addr": addr, "size": size, "stream": stream, "time_us": 1}


def test_a_history_becomes_lives(tmp_path):
    events = [
        event("alloc", 4096),
        event("alloc", 4608),
        event("free_requested", 4096),
        event("free_completed", 4096),
        event("alloc", 4096),
        event("free_completed", 9999),
    ]
    path = snapshot_file(tmp_path / "s.pkl", [segment(4096, [block(2048)])], [events])
    adapted = read_foreign(path)
    (rank,) = adapted.memory_map.ranks
    assert [(t.name, t.offset, t.first_write, t.last_read) for t in rank.temporaries] == [
        ("alloc.0", 0, 0, 2),
        ("alloc.1", 512, 1, 5),
        ("alloc.4", 0, 4, 5),
    ]
    assert checks(adapted) == ["reads and writes", "fixed memory", "ends", "starts"]
    assert check_map(adapted.memory_map).is_clean


def test_a_block_handed_out_twice_is_found(tmp_path):
    events = [event("alloc", 4096), event("alloc", 4352), event("snapshot", 0)]
    path = snapshot_file(tmp_path / "s.pkl", [segment(4096, [block(2048)])], [events])
    assert "overlap" in check_map(read_foreign(path).memory_map).names


def test_an_address_handed_out_twice_is_found(tmp_path):
    events = [event("alloc", 4096), event("alloc", 4096, stream=7), event("snapshot", 0)]
    path = snapshot_file(tmp_path / "s.pkl", [segment(4096, [block(2048)])], [[], events])
    adapted = read_foreign(path)
    assert adapted.memory_map.recipe == {"devices": [1]}
    assert "overlap" in check_map(adapted.memory_map).names
    assert "order between streams" in checks(adapted)


class Attack:
    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_that_would_run_code_is_refused_before_it_runs(tmp_path):
    attack = Attack()
    attack.path = str(tmp_path / "ran")
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [attack], "device_traces": []}))
    with pytest.raises(UsageError, match=r"asks for posix\.mkdir"):
        read_foreign(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_protocol_gets_a_class_through(tmp_path, protocol):
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [Path("x")]}, protocol))
    with pytest.raises(UsageError, match="asks for "):
        read_foreign(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        b"\x80\x04.",
        b"(lp0\nP7\n.",
        b"\x80\x04}\x94b.",
        b"cos\nsystem\n(S'x'\ntR.",
    ],
)
def test_a_broken_pickle_is_refused_by_name(tmp_path, content):
    path = tmp_path / "s.pickle"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"s\.pickle"):
        read_foreign(path)


@pytest.mark.parametrize(
    ("segments", "text"),
    [
        ([3], "segments.0.: `address` is None"),
        ([{"address": -1}], "`address` is -1"),
        ([{**segment(0, [block(8)]), "total_size": 9}], "blocks sum to 8 bytes, `total_size` is 9"),
        ([{**segment(0, []), "blocks": None}], "a list `blocks` is expected"),
    ],
)
def test_a_snapshot_of_another_form_is_refused_with_the_place(tmp_path, segments, text):
    with pytest.raises(UsageError, match=text):
        read_foreign(snapshot_file(tmp_path / "s.pickle", segments))


# MiniMalloc


def csv_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "a.csv"
    path.write_text(text)
    return path


def test_a_placed_csv_becomes_lives(tmp_path):
    path = csv_file(tmp_path, "id,lower,upper,size,offset\na,0,3,4,0\nb,3,5,4,0\nc,0,5,2,4\n")
    adapted = from_minimalloc_csv(path)
    (rank,) = adapted.memory_map.ranks
    assert [(t.name, t.first_write, t.last_read, t.offset) for t in rank.temporaries] == [
        ("a", 0, 2, 0),
        ("b", 3, 4, 0),
        ("c", 0, 4, 4),
    ]
    assert rank.fixed_bytes == 6
    assert check_map(adapted.memory_map).is_clean


def test_a_csv_that_overlaps_is_found(tmp_path):
    path = csv_file(tmp_path, "id,lower,upper,size,offset\na,0,3,4,0\nb,2,5,4,3\n")
    assert check_map(read_foreign(path).memory_map).names == ("touching-overlap",)


def test_a_csv_over_its_capacity_is_found(tmp_path):
    path = csv_file(tmp_path, "id,lower,upper,size,offset\na,0,3,8,0\n")
    adapted = from_minimalloc_csv(path, capacity_bytes=7)
    assert check_map(adapted.memory_map).names == ("outside-arena",)


def test_gaps_split_a_life(tmp_path):
    text = "id,lower,upper,size,offset,gaps\na,0,9,4,0,2-4 6-9\nb,2,4,4,0,\n"
    adapted = from_minimalloc_csv(csv_file(tmp_path, text))
    lives = [(t.name, t.first_write, t.last_read) for t in adapted.memory_map.ranks[0].temporaries]
    assert lives == [("a[0]", 0, 1), ("a[1]", 4, 5), ("b", 2, 3)]
    assert check_map(adapted.memory_map).is_clean


def test_alignment_is_checked(tmp_path):
    text = "id,lower,upper,size,offset,alignment\na,0,3,8,0,8\nb,0,3,8,12,8\n"
    assert check_map(read_foreign(csv_file(tmp_path, text)).memory_map).names == ("misaligned",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column 'id' is missing"),
        ("id,lower,upper\na,0,1\n", "column 'size' is missing"),
        ("id,lower,upper,size\na,0,1,4\n", r"a\.csv:2: no offset; place the buffers first"),
        ("id,lower,upper,size,offset\na,x,1,4,0\n", "lower is 'x'; accepted: an integer"),
        ("id,lower,upper,size,offset\na,1,1,4,0\n", "lower below upper"),
        ("id,lower,upper,size,offset,colour\na,0,1,4,0,red\n", "column 'colour'; accepted"),
        ("id,lower,upper,size,offset,gaps\na,0,9,4,0,5\n", "gap '5'; accepted"),
    ],
)
def test_a_malformed_csv_is_refused_with_the_line(tmp_path, text, message):
    with pytest.raises(UsageError, match=message):
        read_foreign(csv_file(tmp_path, text))


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"'\.txt'; accepted: \.json"):
        read_foreign(tmp_path / "a.txt")
