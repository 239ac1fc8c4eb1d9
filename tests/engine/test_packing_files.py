"""Packing's data, its CSV and its validator: what is accepted, and every error by name."""

from __future__ import annotations

import pytest

from engine.packing import (
    Buffer,
    Instance,
    PackingInputError,
    conflict_violations_of,
    liveness_bound_bytes,
    pack,
    read_csv,
    violations_of,
    write_csv,
)

TWO = (Buffer("a", 0, 4, 3), Buffer("b", 2, 6, 5))


def written(tmp_path, text):
    path = tmp_path / "buffers.csv"
    path.write_text(text)
    return path


def test_columns_are_read_in_any_order(tmp_path):
    path = written(tmp_path, "size,id,upper,lower\n3,a,4,0\n5,b,6,2\n")
    instance, offsets = read_csv(path)
    assert instance.buffers == TWO
    assert offsets == {}


def test_offsets_alignment_and_gaps_are_read(tmp_path):
    text = "id,lower,upper,size,alignment,gaps,offset\na,0,9,3,4,2-3 5-8,12\nb,-5,6,5,,,\n"
    instance, offsets = read_csv(written(tmp_path, text))
    assert instance.buffers == (Buffer("a", 0, 9, 3, 4, ((2, 3), (5, 8))), Buffer("b", -5, 6, 5))
    assert instance.buffers[0].lives == ((0, 2), (3, 5), (8, 9))
    assert offsets == {"a": 12}


@pytest.mark.parametrize(
    "buffers",
    [
        TWO,
        (Buffer("x,y", -7, 9, 3, 4, ((-3, 1),)), Buffer('q"', 0, 1, 0)),
        (),
    ],
    ids=["plain", "aligned with gaps", "none"],
)
def test_what_is_written_is_read_back(tmp_path, buffers):
    path = tmp_path / "out.csv"
    offsets = {buffer.id: 8 * index for index, buffer in enumerate(buffers)}
    write_csv(path, buffers, offsets)
    assert read_csv(path) == (Instance(buffers), offsets)


def test_a_packing_survives_the_file(tmp_path):
    path = tmp_path / "out.csv"
    placement = pack(TWO, 8)
    write_csv(path, TWO, placement.by_id)
    assert path.read_text().startswith("id,lower,upper,size,offset\na,0,4,3,")
    instance, offsets = read_csv(path)
    assert violations_of(instance.buffers, offsets, 8) == []


HEADER = "id,lower,upper,size\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("id,lower,size\n", ":1: no column 'upper'"),
        ("id,lower,upper,size,colour\n", ":1: unknown column 'colour'"),
        ("id,lower,upper,size,size\n", ":1: column 'size' appears twice"),
        (HEADER + "a,0,4,3\nb,0,4\n", ":3: 3 values; the header has 4"),
        (HEADER + "a,0,4,x\n", ":2: size is 'x'"),
        (HEADER + "a,0,4,1.5\n", ":2: size is '1.5'"),
        (HEADER + "a,,4,3\n", ":2: lower is ''"),
        (HEADER + "a,0,4,-3\n", ":2: buffer 'a': size is -3"),
        (HEADER + "a,4,4,3\n", ":2: buffer 'a': lower 4 is not below upper 4"),
        (HEADER + ",0,4,3\n", ":2: id is empty"),
        (HEADER + "a,0,4,3\n\na,1,2,3\n", ":4: id 'a' is already on line 2"),
        ("id,lower,upper,size,alignment\na,0,4,3,0\n", ":2: buffer 'a': alignment is 0"),
        ("id,lower,upper,size,gaps\na,0,4,3,1-2@5\n", ":2: gap '1-2@5'"),
        ("id,lower,upper,size,gaps\na,0,4,3,2-2\n", ":2: buffer 'a': gap 2-2 is empty"),
        ("id,lower,upper,size,gaps\na,0,4,3,3-5\n", ":2: buffer 'a': gap 3-5 is empty, out of"),
        ("id,lower,upper,size,offset\na,0,4,3,low\n", ":2: offset is 'low'"),
        ("id,lower,upper,size,gaps\na,0,4,3,0-4\n", ":2: buffer 'a': its gaps leave it no time"),
    ],
)
def test_malformed_file_is_refused_with_line_and_value(tmp_path, text, message):
    with pytest.raises(PackingInputError) as caught:
        read_csv(written(tmp_path, text))
    assert message in str(caught.value)
    assert "buffers.csv" in str(caught.value)


def test_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(PackingInputError, match=r"absent\.csv: cannot be read"):
        read_csv(tmp_path / "absent.csv")


def test_numbers_beyond_64_bits_are_refused():
    with pytest.raises(PackingInputError, match="sizes and alignments sum to"):
        pack([Buffer("a", 0, 1, 1 << 60)])


def test_doubled_id_is_refused():
    with pytest.raises(PackingInputError, match="'a' appears twice"):
        pack([TWO[0], TWO[0]])


def test_bound_counts_touching_lives_once():
    assert liveness_bound_bytes([Buffer("a", 0, 2, 3), Buffer("b", 2, 4, 5)]) == 5
    assert liveness_bound_bytes([Buffer("a", 0, 3, 3), Buffer("b", 2, 4, 5)]) == 8
    assert liveness_bound_bytes([Buffer("a", 0, 6, 3, 1, ((2, 4),)), Buffer("b", 2, 4, 5)]) == 5
    assert liveness_bound_bytes([]) == 0


@pytest.mark.parametrize(
    ("offsets", "names"),
    [
        ({"a": 0, "b": 3}, []),
        ({"a": 5, "b": 0}, []),
        ({"a": 0, "b": 2}, ["overlap"]),
        ({"a": 0, "b": 0}, ["overlap"]),
        ({"a": 0, "b": 4}, ["out-of-capacity"]),
        ({"a": -1, "b": 3}, ["negative-offset"]),
        ({"a": 0}, ["missing"]),
        ({"a": 0, "b": 3, "c": 0}, ["unknown-buffer"]),
        ({"a": 0, "b": -1}, ["negative-offset", "overlap"]),
        ({}, ["missing", "missing"]),
    ],
)
def test_validator_names_every_violation(offsets, names):
    assert [violation.name for violation in violations_of(TWO, offsets, 8)] == names


def test_validator_says_who_where_and_when():
    (violation,) = violations_of(TWO, {"a": 0, "b": 2}, 8)
    assert violation.ids == ("a", "b")
    assert str(violation) == "overlap: buffers 'a' and 'b' share bytes [2, 3) during [2, 4)"


def test_validator_finds_misalignment_and_respects_gaps():
    buffers = [Buffer("a", 0, 6, 4, 4, ((2, 4),)), Buffer("b", 2, 4, 4), Buffer("c", 0, 6, 0)]
    assert violations_of(buffers, {"a": 0, "b": 0, "c": 2}, 4) == []
    assert [v.name for v in violations_of(buffers, {"a": 2, "b": 0, "c": 2})] == ["misaligned"]
    longer = [buffers[0], Buffer("b", 2, 5, 4), buffers[2]]
    (violation,) = violations_of(longer, {"a": 0, "b": 0, "c": 2})
    assert "during [4, 5)" in violation.detail


@pytest.mark.parametrize(
    ("offsets", "names"),
    [
        ((0, 4, 0), []),
        ((0, 3, 0), ["misaligned", "overlap"]),
        ((0, 8, 0), ["out-of-capacity"]),
        ((0, 4), ["missing"]),
        ((-1, 4, 0), ["negative-offset"]),
    ],
)
def test_conflict_validator_names_every_violation(offsets, names):
    found = conflict_violations_of((4, 4, 4), (1, 2, 1), [(0, 1), (1, 2)], offsets, 8)
    assert sorted({violation.name for violation in found}) == names
