"""Real pytest-benchmark: its own compare passes a 2x slowdown in four ways, the gate in none."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from suites.perf import bench_json, bench_stamp
from suites.perf.bench_stamp import Stamp, stamp_path
from suites.perf.errors import RecordError
from suites.perf.gate import gate
from suites.perf.gate_result import Exit, GateOptions
from suites.perf.planted import BASE_COMMIT, HEAD_COMMIT, write_bench_json
from suites.perf.stats import Outcome, Policy

pytest_plugins = ["pytester"]
NAME = "bench.py::test_plan"
COMPARE = ("--benchmark-compare=0001", "--benchmark-compare-fail=mean:5%")
# A clock that only the work moves (and reading it, by a nanosecond, or pytest-benchmark looks for
# its precision for a second): a 2x slowdown is 2x on any machine.
CLOCK = """
now_s = 0.0
def timer():
    global now_s
    now_s += 1e-9
    return now_s
def work(seconds):
    global now_s
    now_s += seconds
"""
BENCH = """
import virtual
def {name}(benchmark):
    benchmark.pedantic(virtual.work, args=({seconds},), rounds=5)
"""


class Tree:
    """A git checkout with one micro-benchmark, run by a pytest of its own."""

    def __init__(self, pytester, monkeypatch):
        monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        monkeypatch.setenv("PYTHONPATH", str(Path(bench_stamp.__file__).parents[2]))
        monkeypatch.syspath_prepend(str(pytester.path))
        # Asking the processor for its name takes two seconds a run.
        cpu = {"brand_raw": "cpu", "count": 2}
        monkeypatch.setattr("pytest_benchmark.plugin.get_cpu_info", lambda: cpu)
        self.pytester = pytester
        (pytester.path / "virtual.py").write_text(CLOCK)
        (pytester.path / ".gitignore").write_text("*\n!bench_plan.py\n")
        self.git("init", "-q")

    def git(self, *words: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        return subprocess.run(
            ("git", *identity, *words), cwd=self.pytester.path, capture_output=True, text=True,
            check=True,
        ).stdout.strip()  # fmt: skip

    def commit(self, seconds: float, name: str = "test_plan") -> str:
        text = BENCH.format(name=name, seconds=seconds)
        (self.pytester.path / "bench_plan.py").write_text(text)
        self.git("add", "bench_plan.py")
        self.git("commit", "--allow-empty", "-qm", f"{name} {seconds}")
        return self.git("rev-parse", "HEAD")

    def run(self, json_name: str, *options: str, apart: bool = False) -> int:
        words = (
            "bench_plan.py",
            *("-p", "suites.perf.bench_stamp", "-p", "no:cacheprovider"),
            # Imported and rewritten again in every run, hypothesis alone would take a second.
            *("-p", "no:hypothesispytest", "-p", "no:anyio", "-p", "no:syrupy"),
            *("--benchmark-json", json_name, "--benchmark-timer=virtual.timer"),
            *options,
        )
        if apart:
            return int(self.pytester.runpytest_subprocess(*words).ret)
        return int(self.pytester.runpytest_inprocess(*words).ret)

    def gate(self, base: str, head: str, **options):
        folder = self.pytester.path
        return gate(folder / base, folder / head, GateOptions(**options))


@pytest.fixture
def tree(pytester, monkeypatch):
    return Tree(pytester, monkeypatch)


@pytest.fixture
def main(tree):
    """The merged commit, measured and saved as pytest-benchmark's own baseline 0001 as well."""
    commit = tree.commit(0.001)
    assert tree.run("main.json", "--benchmark-autosave") == 0
    return commit


def test_plain_slowdown_of_two_is_red_in_both(tree, main):
    change = tree.commit(0.002)
    assert tree.run("change.json", *COMPARE) != 0
    result = tree.gate("main.json", "change.json", base_commit=main, head_commit=change)
    assert result.exit is Exit.WORSE and result.codes == ("one-process",)


def test_unchanged_benchmark_in_one_process_is_inconclusive_and_asks_for_pairs(tree, main):
    change = tree.commit(0.001000001)
    assert tree.run("change.json", *COMPARE) == 0
    result = tree.gate("main.json", "change.json", base_commit=main, head_commit=change)
    assert result.exit is Exit.INCONCLUSIVE and result.verdicts[0].pairs_more == 4


def test_first_way_parallel_workers(tree, main):
    change = tree.commit(0.002)
    assert tree.run("change.json", *COMPARE, "-n", "2", apart=True) == 0
    result = tree.gate("main.json", "change.json", base_commit=main, head_commit=change)
    assert (result.exit, result.codes) == (Exit.INVALID, ("parallel-workers",))


def test_second_way_disabled_benchmarks(tree, main):
    change = tree.commit(0.002)
    assert tree.run("change.json", *COMPARE, "--benchmark-disable") == 0
    result = tree.gate("main.json", "change.json", base_commit=main, head_commit=change)
    assert (result.exit, result.codes) == (Exit.INVALID, ("benchmarks-disabled",))


def test_third_way_renamed_benchmark(tree, main):
    change = tree.commit(0.002, "test_planner")
    assert tree.run("change.json", *COMPARE) == 0
    result = tree.gate("main.json", "change.json", base_commit=main, head_commit=change)
    assert result.exit is Exit.INVALID and "cells-renamed" in result.codes


def test_fourth_way_red_run_saved_as_the_next_baseline(tree, main):
    change = tree.commit(0.002)
    assert tree.run("red.json", *COMPARE, "--benchmark-autosave") != 0
    latest = ("--benchmark-compare", "--benchmark-compare-fail=mean:5%")
    assert tree.run("again.json", *latest) == 0
    stated = tree.gate("red.json", "again.json", base_commit=main, head_commit=change)
    assert stated.exit is Exit.INVALID and "base-commit" in stated.codes
    unstated = tree.gate("red.json", "again.json")
    assert {"commit-unstated", "same-commit"} <= set(unstated.codes)


def test_fourth_way_with_uncommitted_changes(tree, main):
    text = BENCH.format(name="test_plan", seconds=0.002)
    (tree.pytester.path / "bench_plan.py").write_text(text)
    assert tree.run("red.json", *COMPARE, "--benchmark-autosave") != 0
    change = tree.commit(0.002)
    assert tree.run("again.json") == 0
    result = tree.gate("red.json", "again.json", base_commit=main, head_commit=change)
    assert result.exit is Exit.INVALID and result.codes == ("base-dirty", "one-process")


def test_fourth_way_with_a_ledger(tree, main):
    change = tree.commit(0.002)
    tree.run("red.json")
    red = tree.gate("main.json", "red.json", base_commit=main, head_commit=change)
    later = tree.commit(0.002)
    tree.run("later.json")
    options = {"base_commit": change, "head_commit": later, "ledger": (red.entry(0.0),)}
    assert "baseline-red" in tree.gate("red.json", "later.json", **options).codes


def test_old_file_of_that_name_is_not_taken_for_this_run(tree, main):
    tree.commit(0.001)
    assert tree.run("change.json") == 0
    tree.commit(0.002)
    assert tree.run("change.json", "--benchmark-disable") == 0
    assert bench_stamp.read_stamp(tree.pytester.path / "change.json") == Stamp(0, True, 1, 0, "")
    assert tree.gate("main.json", "change.json", base_commit=main).codes == ("benchmarks-disabled",)


@pytest.mark.filterwarnings("ignore:Not saving anything")
def test_run_that_selects_nothing_proves_nothing(tree, main):
    tree.run("change.json", "-k", "nothing")
    assert tree.gate("main.json", "change.json", base_commit=main).codes == ("benchmarks-not-run",)


def files(folder, order, head_s=0.001, jitter=0.0005, name=NAME):
    """One file per process in the order given; A is the base."""
    for minute, side in enumerate(order):
        seconds = (0.001 if side == "A" else head_s) * (1 + jitter * (minute % 3 - 1))
        commit = BASE_COMMIT if side == "A" else HEAD_COMMIT
        write_bench_json(folder / side / f"{minute}.json", commit, seconds, minute, name)
    return folder / "A", folder / "B"


STATED = GateOptions(BASE_COMMIT, HEAD_COMMIT)


@pytest.mark.parametrize(
    ("head_s", "code"),
    [(0.001, Exit.SAME_OR_BETTER), (0.0011, Exit.WORSE), (0.0009, Exit.SAME_OR_BETTER)],
)
def test_five_pairs_of_processes_get_a_full_verdict(tmp_path, head_s, code):
    result = gate(*files(tmp_path, "ABBABAABBA", head_s), STATED)
    assert (result.exit, result.findings, result.pairs) == (code, (), 5)


@pytest.mark.parametrize(
    ("order", "codes"),
    [
        ("AAAAABBBBB", ("no-pairs",)),
        ("ABABABABAB", ("not-alternating",)),
        ("ABBAB", ("no-pairs",)),
        ("ABBA", ()),
    ],
)
def test_processes_that_form_no_pairs_get_no_verdict(tmp_path, order, codes):
    result = gate(*files(tmp_path, order), STATED)
    assert result.codes == codes
    assert result.exit is (Exit.INVALID if codes else Exit.INCONCLUSIVE)


def test_more_files_than_planned_are_refused(tmp_path):
    sides = files(tmp_path, "ABBA" * 7)
    assert gate(*sides, STATED).codes == ("pairs-over-max",)
    planned = replace(STATED, policy=Policy(pairs_max=14))
    assert gate(*sides, planned).exit is Exit.SAME_OR_BETTER


def edited(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


EDITS = {
    "fingerprint": lambda d: d["machine_info"].update(node="other"),
    "head-commit": lambda d: d["commit_info"].update(id="c" * 40),
    "benchmarks-not-run": lambda d: d["benchmarks"][0]["stats"].update(rounds=0),
    "format": lambda d: d.pop("machine_info"),
    "cells-missing": lambda d: d.update(benchmarks=[]),
}


@pytest.mark.parametrize("code", EDITS)
def test_head_file_is_refused_by_code(tmp_path, code):
    base, head = files(tmp_path, "AB")
    edited(head / "1.json", EDITS[code])
    result = gate(base, head, STATED)
    assert result.exit is Exit.INVALID and code in result.codes


def test_files_of_one_side_must_be_of_one_commit(tmp_path):
    base, head = files(tmp_path, "ABBA")
    edited(head / "1.json", lambda d: d["commit_info"].update(id="c" * 40))
    assert "commit" in gate(base, head, STATED).codes


def test_new_benchmark_is_noted(tmp_path):
    base, head = files(tmp_path, "AB")
    extra = {"fullname": "bench.py::test_new", "stats": {"mean": 1.0, "rounds": 5}}
    edited(head / "1.json", lambda d: d["benchmarks"].append(extra))
    assert gate(base, head, STATED).codes == ("cells-new", "one-process")


def test_unproven_run_may_not_pass(tmp_path):
    sides = files(tmp_path, "ABBABAABBA")
    result = gate(*sides, GateOptions(BASE_COMMIT))
    assert (result.exit, result.codes) == (Exit.INCONCLUSIVE, ("run-unproven",))


def test_stamp_of_another_file_is_refused(tmp_path):
    base, head = files(tmp_path, "AB")
    stamp = {"workers": 0, "disabled": False, "collected": 1, "failed": 0, "json_sha256": "f" * 64}
    stamp_path(head / "1.json").write_text(json.dumps(stamp))
    assert gate(base, head, STATED).codes == ("stale-json",)
    stamp_path(head / "1.json").write_text("{}")
    assert gate(base, head, STATED).codes == ("record",)


def test_empty_folder_and_missing_file_are_refused(tmp_path):
    base, head = files(tmp_path, "AB")
    (tmp_path / "empty").mkdir()
    assert gate(base, tmp_path / "empty", STATED).codes == ("benchmarks-not-run",)
    assert gate(base, tmp_path / "gone.json", STATED).codes == ("benchmarks-not-run",)


@pytest.mark.parametrize(
    ("found", "stated", "same"),
    [
        ("0572fd12", "0572fd12ab", True),
        ("0572FD12AB", "0572fd12", True),
        ("0572fd", "0572fd", False),
        ("", "", False),
        ("unversioned", "0572fd12", False),
        ("0572fd12", "0572fd13", False),
    ],
)
def test_commits_agree_on_seven_digits_at_least(found, stated, same):
    assert bench_json.same_commit(found, stated) is same


def test_foreign_json_is_refused_by_name(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(RecordError, match="x.json"):
        bench_json.read_bench(tmp_path / "x.json")


def test_many_benchmarks_in_one_process_still_show_a_doubling(tmp_path):
    base, head = files(tmp_path, "AB", head_s=0.002)
    assert gate(base, head, STATED).verdicts[0].outcome is Outcome.DIFFERENT
