"""Memory maps as data: good ones have no finding, bad ones exactly those they name."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jsonschema
import pytest

from engine.ir import graph_from_json
from suites.memory import names
from suites.memory.checks import check_document
from suites.memory.documents import check_schema

FOLDER = Path(__file__).parents[2] / "fixtures" / "memmaps"
CASES = sorted(FOLDER.glob("*/*.json"))
SHOWN_ELSEWHERE = {"not-repeatable"}
"""Findings that need two maps; their tests are in test_memory_checks."""


@cache
def read(path: Path) -> dict:
    return json.loads(path.read_text())


def case_id(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", CASES, ids=case_id)
def test_a_case_is_judged_as_it_says(path):
    case = read(path)
    graphs = {
        int(rank): [graph_from_json(document) for document in documents]
        for rank, documents in case.get("graphs", {}).items()
    }
    judged = check_document(case["map"], graphs, **case.get("options", {}))
    told = "\n".join(map(str, judged.findings))
    assert list(judged.names) == sorted(case.get("expected", [])), told
    assert all(finding.message and finding.where for finding in judged.findings)


@pytest.mark.parametrize("path", CASES, ids=case_id)
def test_a_case_has_the_form_of_a_case(path):
    schema = json.loads((FOLDER / "case.schema.json").read_text())
    case = read(path)
    jsonschema.validate(case, schema)
    assert ("expected" in case) == (path.parent.name == "bad")
    assert set(case.get("expected", ())) <= set(names.ALL)
    if "schema" not in case.get("expected", ()):
        assert list(check_schema(case["map"])) == []


def test_about_half_of_the_cases_are_bad():
    bad = [path for path in CASES if path.parent.name == "bad"]
    assert len(CASES) > 80
    assert 0.4 <= len(bad) / len(CASES) <= 0.6


def test_no_two_cases_are_alike():
    assert len({read(path)["describes"] for path in CASES}) == len(CASES)
    contents = [{k: v for k, v in read(path).items() if k != "describes"} for path in CASES]
    assert len({json.dumps(content) for content in contents}) == len(CASES)


def test_every_finding_of_maps_and_graphs_is_shown_by_some_bad_case():
    shown = {name for path in CASES for name in read(path).get("expected", ())}
    assert shown | SHOWN_ELSEWHERE >= set(names.MAP) | set(names.GRAPH)


def test_every_fault_class_that_a_map_can_show_has_a_bad_case():
    faults = {fault for path in CASES for fault in read(path).get("faults", ())}
    # Padding rows (M13) and host memory readings (M17) do not show in a map.
    assert faults == {f"M{n:02d}" for n in range(1, 17)} - {"M13"}
