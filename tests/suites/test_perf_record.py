"""Stored runs: schema and dataclasses agree, damage is refused by path, writes are atomic."""

import json
from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

import jsonschema
import pytest

from suites.perf import files, run_record
from suites.perf.codec import from_data, to_data
from suites.perf.errors import RecordError
from suites.perf.planted import bench_records
from suites.perf.run_record import SCHEMA_PATH, RunRecord


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict:
    base, _ = bench_records(tmp_path_factory.mktemp("run"))
    return to_data(base)


def test_record_survives_a_round_trip(stored, tmp_path):
    record = run_record.parse_record(json.loads(json.dumps(stored)), "memory")
    run_record.save_record(record, tmp_path / "run.json")
    assert run_record.load_record(tmp_path / "run.json") == record


def test_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(json.loads(SCHEMA_PATH.read_text()))


def _dataclasses(kind, found):
    if is_dataclass(kind) and kind not in found:
        found.add(kind)
        for hint in get_type_hints(kind).values():
            for part in (hint, *get_args(hint)):
                _dataclasses(part, found)
    return found


def test_schema_and_dataclasses_have_the_same_fields():
    schema = json.loads(SCHEMA_PATH.read_text())
    objects = [schema, *schema["$defs"].values()]
    described = {frozenset(o["properties"]) for o in objects}
    declared = {frozenset(f.name for f in fields(k)) for k in _dataclasses(RunRecord, set())}
    assert described == declared
    assert all(set(o["required"]) == set(o["properties"]) for o in objects)
    assert all(o["additionalProperties"] is False for o in objects)


def _set(path, value):
    def change(data):
        *parents, last = path
        for key in parents:
            data = data[key]
        data[last] = value

    return change


def _drop(*path):
    def change(data):
        *parents, last = path
        for key in parents:
            data = data[key]
        del data[last]

    return change


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_set(("schema",), "perf-run/2"), "schema"),
        (_set(("surprise",), 1), "surprise"),
        (_drop("policy"), "policy"),
        (_drop("starts", 0, "outputs"), "starts/0.*outputs"),
        (_set(("arm",), "C"), "arm"),
        (_set(("facts", "commit"), "main"), "facts/commit"),
        (_set(("policy", "alpha"), 0), "policy/alpha"),
        (_set(("policy", "pairs_min"), 3), "policy/pairs_min"),
        (_set(("starts", 0, "pair"), -1), "starts/0/pair"),
        (_set(("starts", 0, "canary_before", "bandwidth_gb_s"), "fast"), "canary_before"),
        (_set(("starts", 0, "cells", 0, "samples"), []), "samples"),
        (_set(("cells", 0, "kind"), "guess"), "cells/0/kind"),
        (_set(("cells", 0, "margin"), 2), "cells/0/margin"),
        (_set(("starts", 0, "outputs", "logprob_sha256"), "x"), "logprob_sha256"),
        (_set(("outputs_rule",), "any"), "outputs_rule"),
    ],
)
def test_damaged_record_is_refused_by_path(stored, damage, named):
    data = json.loads(json.dumps(stored))
    damage(data)
    with pytest.raises(RecordError, match=f"memory.*{named}"):
        run_record.parse_record(data, "memory")


@pytest.mark.parametrize(
    ("text", "named"),
    [("", "no JSON"), ("{", "no JSON"), ('{"a": NaN}', "NaN"), ("[1, Infinity]", "Infinity")],
)
def test_file_that_is_no_json_is_refused(tmp_path, text, named):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=f"run.json.*{named}"):
        run_record.load_record(path)


def test_missing_and_binary_files_are_refused_by_name(tmp_path):
    with pytest.raises(RecordError, match="gone.json does not exist"):
        run_record.load_record(tmp_path / "gone.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match="b.json"):
        run_record.load_record(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (3, "object is accepted"),
        ({"dropped": True}, "how.*missing"),
        ({"dropped": 1, "how": "x"}, "bool is accepted"),
        ({"dropped": True, "how": "x", "who": 1}, "unknown.*who"),
    ],
)
def test_codec_refuses_what_it_cannot_place(data, named):
    with pytest.raises(RecordError, match=named):
        from_data(run_record.CacheDrop, data)


def test_interrupted_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    files.write_atomically(path, "old")

    def lost_power(_):
        raise OSError("lost power")

    monkeypatch.setattr(files.os, "fsync", lost_power)
    with pytest.raises(OSError, match="lost power"):
        files.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_start_without_a_cell_is_refused_with_the_cells_it_has(stored):
    start = run_record.parse_record(json.loads(json.dumps(stored)), "memory").starts[0]
    with pytest.raises(RecordError, match="lacks 'prefill_30k'.*prefill_300"):
        start.samples("prefill_30k")
