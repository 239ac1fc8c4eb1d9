"""Commands as a user meets them: help, exit codes, strict options and environment, clear errors."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from engine import errors
from engine.cli import options
from engine.cli.common import (
    ENVIRONMENT,
    EXIT_CODES,
    INTERNAL_ERROR,
    TERMINATED,
    check_environment,
    outcome,
)
from engine.cli.flare import cli as flare
from engine.cli.ignition import cli as ignition
from engine.errors import UsageError
from engine.packing.errors import DoesNotFitError, GaveUpError
from engine.recipe import Recipe
from engine.units import GIB

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "fixtures" / "goldens" / "mini"
SMALL = ["--gpus", "cpu", "--prefill-chunk", "16", "--max-concurrency", "2"]
SMALL += ["--mtp-draft-tokens", "2"]


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Run a command here: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("SPARKPROOF_", "IGNITION_", "FLARE_")):
            monkeypatch.delenv(name)

    def run(command, *arguments):
        code = outcome(command, [str(a) for a in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def all_commands():
    for group in (ignition, flare):
        yield group.name, [], group
        for name in group.commands:
            yield f"{group.name} {name}", [name], group


# --- help and exit codes --------------------------------------------------------------------


@pytest.mark.parametrize(
    "title, path, group", list(all_commands()), ids=lambda value: str(value)[:20]
)
def test_help_shows_every_exit_code_and_variable(title, path, group, call):
    code, out, err = call(group, *path, "--help")
    assert code == 0 and err == ""
    assert out.startswith(f"Usage: {title}")
    for number, meaning in EXIT_CODES.items():
        assert f"{number}  {meaning.split(',')[0][:30]}" in out
    assert all(name in out for name in ENVIRONMENT)


def test_help_of_export_has_the_words_and_defaults_of_the_seed(call):
    _, out, _ = call(ignition, "export", "--help")
    for word in ("--ranks", "--rendezvous HOST:PORT", "--gpus", "--max-concurrency", "--scratch"):
        assert word in out
    flat = re.sub(r"\s+", " ", out)
    for flag, default in (
        ("--ranks", "3"),
        ("--max-concurrency", "32"),
        ("--mtp-draft-tokens", "7"),
        ("--prefill-chunk", "4096"),
        ("--host-memory-floor", "8.00 GiB"),
    ):
        assert re.search(rf"{flag} .*?\[default: {re.escape(default)}\]", flat)


def test_every_kind_of_error_has_a_documented_code_of_its_own():
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.SparkproofError)
    ]
    kinds += [DoesNotFitError, GaveUpError]
    codes = [kind.exit_code for kind in kinds]
    assert len(set(codes)) == len(codes)
    assert set(codes) <= set(EXIT_CODES)


def test_the_page_on_exit_codes_agrees_with_the_commands():
    text = (ROOT / "docs" / "exit-codes.md").read_text()
    rows = dict(re.findall(r"^\| (\S+) \| (.*) \|$", text, re.MULTILINE))
    assert {int(k): v for k, v in rows.items() if k.isdecimal()} == dict(EXIT_CODES)
    assert {k.strip("`"): v for k, v in rows.items() if k.startswith("`")} == dict(ENVIRONMENT)


def test_a_bug_of_ours_shows_its_traceback_and_ends_with_its_own_code(call):
    @click.command("broken")
    def broken():
        raise AssertionError("offset is negative")

    code, _, err = call(broken)
    assert code == INTERNAL_ERROR
    assert "Traceback" in err and "offset is negative" in err


def test_a_user_error_is_one_line_without_a_traceback(call):
    code, out, err = call(ignition, "export", "nowhere", "--local", "--gpus", "cpu")
    assert code == errors.CheckpointError.exit_code
    assert out == "" and err.startswith("error: no checkpoint 'nowhere'")
    assert len(err.splitlines()) == 1


# --- options and environment ----------------------------------------------------------------


@pytest.mark.parametrize(
    "group, arguments, expected",
    [
        (ignition, ["exprot"], "did you mean export?"),
        (ignition, ["export", GOLDEN, "--rank", "3"], "Did you mean '--ranks'?"),
        (ignition, ["plan", GOLDEN, "--scratch", "poools"], "'poools' is not one of"),
        (
            ignition,
            ["plan", GOLDEN, "--ranks", "9"],
            "ranks is 9; accepted: an integer from 1 to 8",
        ),
        (ignition, ["plan", GOLDEN, "--prefill-chunk", "0"], "prefill_chunk is 0"),
        (ignition, ["plan", GOLDEN, "--gpus", "0,1"], "--gpus is '0,1'"),
        (ignition, ["plan", GOLDEN, "--host-memory-floor", "8 pounds"], "GiB"),
        (ignition, ["plan", GOLDEN, "--recipe", "none.toml"], "which is no file"),
        (ignition, ["export", GOLDEN, "--gpus", "cpu"], "need --rendezvous HOST:PORT, or --local"),
        (ignition, ["join", "host:1", "--rank", "0", "--ranks", "3"], "--rank is 0"),
        (ignition, ["pack", "x.csv", "--capacity", "0"], "0 is not above 0"),
        (flare, ["inspect"], "Missing argument"),
        (flare, ["inspect", "--diff", "a"], "1 paths given; 2 needed for --diff"),
        (flare, ["inspect", "--check", "--draw", "a"], "exclude each other"),
        (flare, ["inspect", "nowhere"], "nowhere does not exist"),
        (flare, ["run", "nowhere", "--scheduler-policy", "fair"], "'fair' is not one of"),
        (flare, ["run", "nowhere", "--port", "70000"], "70000 is not in the range"),
        (flare, ["run", "nowhere", "--kv-cache-limit", "lots"], "lots"),
    ],
    ids=lambda value: " ".join(map(str, value))[-30:] if isinstance(value, list) else "",
)
def test_what_is_not_accepted_is_named_with_what_would_be(group, arguments, expected, call):
    code, out, err = call(group, *arguments)
    assert code == UsageError.exit_code
    assert out == "" and expected in err
    assert err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("name", ["SPARKPROOF_SECERT", "IGNITION_RANKS", "FLARE_PORT"])
def test_an_unknown_variable_with_our_prefix_is_an_error(name, call, monkeypatch):
    monkeypatch.setenv(name, "1")
    code, _, err = call(ignition, "plan", GOLDEN)
    assert code == UsageError.exit_code
    assert f"unknown environment variable {name!r}" in err


def test_a_near_variable_is_suggested_and_known_or_foreign_ones_pass():
    with pytest.raises(UsageError, match="did you mean SPARKPROOF_SECRET"):
        check_environment({"SPARKPROOF_SECRETS": "x"})
    check_environment({"SPARKPROOF_SECRET": "x", "HOME": "/", "MY_FLARE_X": "1"})


def test_options_win_over_the_recipe_file(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text('[recipe]\nranks = 2\nprefill_chunk = 64\nhost_memory_floor = "1GiB"\n')
    recipe = options.build_recipe(file, "cpu", {"prefill_chunk": 32, "scratch": None})
    assert recipe == Recipe(ranks=2, prefill_chunk=32, host_memory_floor_bytes=GIB, device="cpu")


def test_an_unknown_key_of_a_recipe_file_is_refused(tmp_path, call):
    file = tmp_path / "r.toml"
    file.write_text("[recipe]\nprefil_chunk = 64\n")
    code, _, err = call(ignition, "plan", GOLDEN, "--gpus", "cpu", "--recipe", file)
    assert code == UsageError.exit_code and "unknown key 'prefil_chunk'" in err


# --- secrets --------------------------------------------------------------------------------


def test_a_secret_file_that_others_can_read_is_refused(tmp_path):
    file = tmp_path / "secret"
    file.write_text("x")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="mode 644.*600 is needed"):
        options.find_secret(file, "host:1", local=False, environ={})
    file.chmod(0o600)
    assert options.find_secret(file, "host:1", local=False, environ={}) == "x"


def test_ranks_on_loopback_find_one_secret_that_only_their_user_can_read(tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    first = options.find_secret(None, "127.0.0.1:1", local=False, environ=environ)
    second = options.find_secret(None, "localhost:1", local=False, environ=environ)
    assert first == second and len(first) >= 32
    mode = (tmp_path / "sparkproof" / "secret").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


def test_ranks_on_other_hosts_must_be_given_a_secret():
    with pytest.raises(UsageError, match="SPARKPROOF_SECRET"):
        options.find_secret(None, "10.0.0.1:1", local=False, environ={})
    given = {"SPARKPROOF_SECRET": "y"}
    assert options.find_secret(None, "10.0.0.1:1", local=False, environ=given) == "y"


def test_local_ranks_get_a_new_secret_each_time():
    first, second = (options.find_secret(None, None, True, environ={}) for _ in range(2))
    assert first != second


# --- plan, inspect, pack --------------------------------------------------------------------


@pytest.fixture(scope="module")
def map_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("plan") / "map.json"
    assert outcome(ignition, ["plan", str(GOLDEN), *SMALL, "-o", str(file)]) == 0
    return file


def test_plan_prints_the_inventory_and_writes_the_map(call, tmp_path):
    file = tmp_path / "map.json"
    code, out, err = call(ignition, "plan", GOLDEN, *SMALL, "-o", file)
    assert code == 0
    for row in ("core fixed mappings", "graph scratch pools", "allocator slack", "rank 2"):
        assert row in out
    assert "79.5 bytes a token" in out
    assert 'phase="plan"' in err
    document = json.loads(file.read_text())
    assert document["version"] == "memmap/1" and len(document["ranks"]) == 3


def test_plan_prints_the_map_as_json(call, map_file):
    code, out, _ = call(ignition, "plan", GOLDEN / "config.json", *SMALL, "--json")
    assert code == 0 and json.loads(out) == json.loads(map_file.read_text())


def test_plan_refuses_a_bad_configuration(call, tmp_path):
    document = json.loads((GOLDEN / "config.json").read_text())
    document["text_config"]["hidden_sise"] = 1
    (tmp_path / "config.json").write_text(json.dumps(document))
    code, _, err = call(ignition, "plan", tmp_path, *SMALL)
    assert code == errors.ConfigError.exit_code and "'hidden_sise'" in err


def test_inspect_shows_a_map_and_one_rank_of_it(call, map_file):
    code, out, _ = call(flare, "inspect", "--memory-map", map_file, "--rank", "1")
    assert code == 0 and "rank 1: arenas" in out and "rank 2: arenas" not in out
    code, _, err = call(flare, "inspect", "--memory-map", map_file, "--rank", "7")
    assert code == 2 and "the map has ranks 0, 1, 2" in err


def test_inspect_check_passes_a_good_map_and_says_what_it_could_not_check(call, map_file):
    code, out, _ = call(flare, "inspect", "--check", map_file)
    assert code == 0
    assert out.splitlines()[-1] == "0 findings" and "not checked: " in out


def test_inspect_check_lists_every_finding_of_a_bad_map(call, map_file, tmp_path):
    document = json.loads(map_file.read_text())
    first = document["ranks"][0]
    first["allocations"][1]["offset"] = first["allocations"][0]["offset"]
    first["temporaries"][0]["offset"] = 10**12
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(document))
    code, out, _ = call(flare, "inspect", "--check", bad)
    assert code == 1
    assert "allocations-overlap" in out and "outside-arena" in out
    code, out, _ = call(flare, "inspect", "--check", "--json", bad)
    assert code == 1
    assert {"allocations-overlap", "outside-arena"} <= {
        finding["name"] for finding in json.loads(out)["findings"]
    }


def test_inspect_diff_is_silent_about_equal_maps_and_names_what_moved(call, map_file, tmp_path):
    assert call(flare, "inspect", "--diff", map_file, map_file)[0] == 0
    other = tmp_path / "other.json"
    call(ignition, "plan", GOLDEN, *SMALL[:3], "32", *SMALL[4:], "-o", other)
    code, out, _ = call(flare, "inspect", "--diff", map_file, other)
    assert code == 1
    assert "recipe.prefill_chunk: 16 -> 32" in out and "other_owned_tensors" in out


def test_inspect_draws_a_page_and_a_text(call, map_file, tmp_path):
    page = tmp_path / "map.html"
    assert call(flare, "inspect", "--html", page, map_file)[0] == 0
    assert page.read_text().lstrip().lower().startswith("<!doctype html")
    code, out, _ = call(flare, "inspect", "--draw", map_file)
    assert code == 0 and "rank 0, graph decode" in out


def test_pack_writes_offsets_and_says_when_nothing_fits(call, tmp_path):
    file, result = tmp_path / "b.csv", tmp_path / "out.csv"
    file.write_text("id,lower,upper,size\na,0,2,4\nb,1,3,4\nc,2,4,4\n")
    code, out, _ = call(ignition, "pack", file, "--capacity", "8", "-o", result)
    assert code == 0 and "peak 8 bytes" in out
    assert result.read_text().splitlines()[0] == "id,lower,upper,size,offset"
    code, _, err = call(ignition, "pack", file, "--capacity", "7")
    assert code == DoesNotFitError.exit_code and err.startswith("error: ")
    code, out, _ = call(ignition, "pack", file, "--json")
    assert code == 0 and json.loads(out)["peak_bytes"] == 8


# --- as processes ---------------------------------------------------------------------------


def spawn(module, *arguments, **more):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SPARKPROOF_")}
    return subprocess.Popen(
        [sys.executable, "-m", f"engine.cli.{module}", *map(str, arguments)],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def test_a_closed_pipe_is_no_error():
    process = spawn("ignition", "plan", GOLDEN, *SMALL, "--json")
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(30) == 0 and "Traceback" not in error


def test_sigterm_while_waiting_for_ranks_ends_at_once_with_its_code(tmp_path):
    arguments = ["export", GOLDEN, *SMALL, "--rendezvous", options.free_address()]
    process = spawn("ignition", *arguments, "-o", tmp_path / "p")
    while 'phase="rendezvous"' not in process.stderr.readline():
        pass
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == TERMINATED and "ended by SIGTERM" in err
    assert time.monotonic() - start < 5
    assert not (tmp_path / "p").exists()


def test_a_command_that_cannot_end_after_sigterm_is_cut_off():
    code = (
        "import time, click\n"
        "from engine.cli.common import run\n"
        "@click.command('stuck')\n"
        "@click.pass_obj\n"
        "def stuck(grace):\n"
        "    grace.seconds = 0.3\n"
        "    try:\n"
        "        print('in', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        time.sleep(60)\n"
        "run(stuck, [])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout.readline() == b"in\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == TERMINATED
        assert b"still running 0.3 s after SIGTERM" in process.stderr.read()


# --- the journal ----------------------------------------------------------------------------
