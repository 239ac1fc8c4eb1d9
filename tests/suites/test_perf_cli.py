"""The commands bench and gate: exit codes, help that teaches, files written, resume by Ctrl-C."""

import json

import click
import pytest
from click.testing import CliRunner

from suites.perf import cli_bench
from suites.perf.arms import Adapter, register_adapter, registered_adapter
from suites.perf.cli_bench import bench_command, gate_command
from suites.perf.double import CLEAN, Faults, double_arms
from suites.perf.errors import PerfError
from suites.perf.ledger import read_ledger
from suites.perf.planted import bench_records
from suites.perf.run_record import save_record

BASE_COMMIT, HEAD_COMMIT = "0572fd12", "bbad44fe"


@pytest.fixture
def arms():
    """Registers the double: target `a` is the base, any other the head; faults may be planted."""
    pair, host = double_arms(3)
    by_name = {"a": pair[0]}
    register_adapter(Adapter(lambda target: by_name.get(target, pair[1]), host.host))
    yield pair
    register_adapter(None)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    return {
        "same": bench_records(folder / "same"),
        "worse": bench_records(folder / "worse", Faults(speed=0.9)),
    }


def invoke(command, *words):
    return CliRunner().invoke(command, [str(word) for word in words])


def bench(folder, *options):
    return invoke(bench_command, "a", "b", "--cells", "mini", "--out", folder, *options)


def gate(records, folder, *options):
    for record, name in zip(records, ("base", "head"), strict=True):
        save_record(record, folder / f"{name}.json")
    return invoke(gate_command, folder / "base.json", folder / "head.json", *options)


@pytest.mark.parametrize(
    ("faults", "code", "shown"),
    [
        (CLEAN, 0, "same or better"),
        (Faults(speed=0.9), 1, "worse"),
        (Faults(start_sd=0.05), 2, "inconclusive, which is not a pass"),
        (Faults(speed=1.2, logprobs="garbage"), 3, "outputs-void"),
        (Faults(usage=False), 3, "usage-missing"),
        (Faults(failing_starts=(0, 1, 2)), 3, "starts-failed"),
    ],
)
def test_bench_exits_with_the_verdict(arms, tmp_path, faults, code, shown):
    arms[1].faults = faults
    result = bench(tmp_path, "--markdown", tmp_path / "table.md")
    assert result.exit_code == code, result.output
    assert shown in result.output
    if code < 3:
        assert (tmp_path / "table.md").read_text().startswith("**" + shown)


def test_interrupted_bench_exits_with_130_and_goes_on(arms, tmp_path):
    arms[1].faults = Faults(interrupt_at=2)
    stopped = bench(tmp_path)
    assert stopped.exit_code == 130 and "run the same command" in stopped.output
    arms[1].faults = CLEAN
    again = bench(tmp_path)
    assert again.exit_code == 0 and "resume: 4 starts kept" in again.output


def test_resuming_with_other_options_is_refused(arms, tmp_path):
    bench(tmp_path)
    result = bench(tmp_path, "--max-pairs", "20")
    assert result.exit_code == 3 and "stored policy" in result.output


def test_bench_shows_progress_and_time_left(arms, tmp_path):
    output = bench(tmp_path).output
    assert "start done: pair 1, arm A  (0 pairs of about 5 (at most 12), about" in output
    assert "ended: decided after" in output


def test_bench_without_an_adapter_says_what_is_missing(tmp_path):
    register_adapter(None)
    result = bench(tmp_path)
    assert result.exit_code == 3 and "no-adapter" in result.output
    with pytest.raises(PerfError, match="register_adapter"):
        registered_adapter()


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--margin", "90%"), "below 50%"),
        (("--margin", "two"), "2% or 0.02"),
        (("--cells", "all"), "'mini', 'seed'"),
        (("--idle", "-1"), "x>=0"),
        (("--surprise",), "No such option"),
        (("--pairs", "3"), "5 <= pairs_min"),
        (("--pairs", "9", "--max-pairs", "8"), "pairs_min 9, pairs_max 8"),
    ],
)
def test_wrong_option_of_bench_is_refused_with_three(arms, tmp_path, options, shown):
    result = bench(tmp_path / "run", *options)
    assert result.exit_code == 3 and shown in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [bench_command, gate_command])
def test_help_teaches_and_names_the_exit_codes(command):
    output = invoke(command, "--help").output
    for word in ("Exit codes", "0  every cell", "1  at least one", "2  inconclusive", "3  invalid"):
        assert word in output
    assert "sparkproof" in output


def test_gate_passes_and_writes_table_and_json(records, tmp_path):
    files = "--markdown", tmp_path / "gate.md", "--json", tmp_path / "gate.json"
    result = gate(records["same"], tmp_path, "--base-commit", BASE_COMMIT, *files)
    assert result.exit_code == 0, result.output
    text = (tmp_path / "gate.md").read_text()
    assert text.startswith("**same or better") and "| decode_prose_x1 (tok/s) |" in text
    assert "Not shown: an intermittent fault" in text
    assert json.loads((tmp_path / "gate.json").read_text())["exit"] == 0


def test_gate_stops_a_slower_head(records, tmp_path):
    assert gate(records["worse"], tmp_path).exit_code == 1


def test_gate_refuses_with_the_reason(records, tmp_path):
    result = gate(records["same"], tmp_path, "--base-commit", "deadbeef")
    assert result.exit_code == 3 and "base-commit" in result.output


def test_gate_judges_with_a_stated_margin(records, tmp_path):
    assert gate(records["worse"], tmp_path, "--margin", "0.2").exit_code == 0


def test_gate_remembers_red_heads_and_accepted_ones(records, tmp_path):
    ledger = tmp_path / "state" / "ledger.jsonl"
    assert gate(records["worse"], tmp_path, "--ledger", ledger).exit_code == 1
    assert [entry.red for entry in read_ledger(ledger)] == [True]
    accepted = gate(records["worse"], tmp_path, "--ledger", ledger, "--accept", "needed")
    assert accepted.exit_code == 1
    assert [entry.red for entry in read_ledger(ledger)] == [True, False]


def test_accept_without_a_ledger_is_refused(records, tmp_path):
    result = gate(records["worse"], tmp_path, "--accept", "because")
    assert result.exit_code == 3 and "--ledger" in result.output


def test_unusable_ledger_is_refused_before_judging(records, tmp_path):
    (tmp_path / "file").write_text("")
    result = gate(records["same"], tmp_path, "--ledger", tmp_path / "file" / "ledger.jsonl")
    assert result.exit_code == 3 and "ledger" in result.output


def test_missing_files_are_invalid_not_a_traceback(tmp_path):
    result = invoke(gate_command, tmp_path / "a.json", tmp_path / "b.json")
    assert result.exit_code == 3 and "benchmarks-not-run" in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_missing_argument_is_a_usage_error_with_three():
    result = invoke(gate_command)
    assert result.exit_code == 3 and "Missing argument" in result.output


def test_commands_mount_into_a_group():
    group = click.Group("sparkproof", commands=[bench_command, gate_command])
    output = invoke(group, "--help").output
    assert "bench" in output and "gate" in output


@pytest.mark.parametrize(("text", "value"), [("2%", 0.02), ("0.02", 0.02), ("0.5%", 0.005)])
def test_percentages_are_read_both_ways(text, value):
    assert cli_bench.PERCENT.convert(text, None, None) == pytest.approx(value)
