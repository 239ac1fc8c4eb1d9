"""`flare run` as a process: ready, answering, ending; and what it refuses before it loads."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engine import errors
from engine.cli.common import outcome
from engine.cli.flare import cli as flare
from engine.cli.ignition import cli as ignition
from engine.cli.run_options import (
    RunOptions,
    check_device,
    number_of_ranks,
    read_own_header,
    start_options,
)
from engine.cli.serve import followers
from engine.errors import PackageError, UsageError
from engine.package_format import read_header
from engine.rendezvous import ANY

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "fixtures" / "goldens" / "mini"
START_S = 300
"""Kernels may have to be compiled first, on a busy machine."""

OPTIONS = RunOptions(
    package=Path("p"),
    rank=0,
    gpus="cpu",
    kv_cache_limit="memory",
    scheduler_policy="throughput",
    mtp_draft_tokens=None,
    prefix_cache_memory=0,
    prefix_cache_disk=None,
    prefix_cache_disk_limit=1,
    host_memory_floor=None,
    host="127.0.0.1",
    port=0,
    model_name=None,
    threads=None,
    api_key_file=None,
    drain_s=5.0,
    package_cache=None,
    unverified=False,
)


def export(directory, ranks):
    arguments = ["export", str(GOLDEN), "--gpus", "cpu", "--local", "-o", str(directory)]
    arguments += ["--ranks", str(ranks), "--max-concurrency", "2", "--prefill-chunk", "16"]
    arguments += ["--mtp-draft-tokens", "2", "--host-memory-floor", "1GiB"]
    assert outcome(ignition, arguments) == 0
    return directory


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return export(tmp_path_factory.mktemp("alone") / "mini", 1)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return export(tmp_path_factory.mktemp("three") / "mini", 3)


class Server:
    """`flare run` as a process, with its logs in a file."""

    def __init__(self, package, log, *arguments):
        self.log = log
        command = [sys.executable, "-m", "engine.cli.flare", "run", str(package), "--gpus", "cpu"]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, "--port", "0", *map(str, arguments)],
                cwd=ROOT,
                env={k: v for k, v in os.environ.items() if not k.startswith("SPARKPROOF_")},
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def ready(self):
        line = self.process.stdout.readline()
        assert re.fullmatch(r"ready http://127\.0\.0\.1:\d+\n", line), (line, self.said)
        return line.split()[1]

    def wait_for(self, text, limit_s=START_S):
        deadline = time.monotonic() + limit_s
        while text not in self.said:
            assert self.process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.05)

    @property
    def said(self):
        return self.log.read_text()

    @property
    def children(self):
        found = psutil.Process(self.process.pid).children()
        return {int(re.search(r"--rank (\d)", " ".join(p.cmdline()))[1]): p.pid for p in found}

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path):
    servers = []

    def begin(*arguments):
        servers.append(Server(*arguments[:1], tmp_path / f"log{len(servers)}", *arguments[1:]))
        return servers[-1]

    yield begin
    for server in servers:
        server.end()


def complete(url, ids, count=3):
    body = {"model": "mini", "prompt": ids, "max_tokens": count, "temperature": 0, "logprobs": 20}
    request = urllib.request.Request(
        url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]


# --- what is refused ------------------------------------------------------------------------


def test_ranks_compare_options_recipe_package_and_code(alone):
    options = replace(OPTIONS, package=alone)
    offered = start_options(options, read_own_header(options))
    assert offered["recipe.prefill_chunk"] == 16 and offered["kv-cache-limit"] == "memory"
    assert re.fullmatch("[0-9a-f]{64}", offered["package"])
    without = start_options(replace(options, rank=1), None)
    assert without.keys() == offered.keys()
    assert {name for name, value in without.items() if value == ANY} == {
        name for name in offered if name == "package" or name.startswith("recipe.")
    }


def test_a_rank_without_a_package_needs_the_number_of_ranks(tmp_path):
    options = replace(OPTIONS, package=tmp_path, rank=1)
    assert read_own_header(options) is None
    with pytest.raises(UsageError, match="rank-1.safetensors is not here yet; --ranks is needed"):
        number_of_ranks(options, None, None)
    assert number_of_ranks(options, None, 3) == 3


def test_a_rank_or_number_of_ranks_that_the_package_has_not_is_refused(alone):
    header = read_header(alone / "model.safetensors")
    with pytest.raises(UsageError, match="--ranks is 3; .* was exported for 1"):
        number_of_ranks(OPTIONS, header, 3)
    with pytest.raises(UsageError, match="--rank is 2; accepted: 0 to 0"):
        number_of_ranks(replace(OPTIONS, rank=2), header, None)


def test_a_package_for_another_device_is_refused(alone):
    header = read_header(alone / "model.safetensors")
    with pytest.raises(UsageError, match="--gpus is '0', but .* was exported for cpu"):
        check_device("0", header)
    check_device("cpu", header)


def test_rank_0_needs_its_own_package(tmp_path):
    with pytest.raises(PackageError, match="model.safetensors"):
        read_own_header(replace(OPTIONS, package=tmp_path))


def test_local_ranks_are_started_with_the_same_options(tmp_path):
    options = replace(
        OPTIONS,
        package=tmp_path,
        kv_cache_limit=1000,
        mtp_draft_tokens=1,
        unverified=True,
        host_memory_floor=5,
    )
    ranks = followers(options, 3, "127.0.0.1:1", "s")
    command = " ".join(ranks._commands[2])
    for part in ("--rank 2", "--ranks 3", "--kv-cache-limit 1000", "--mtp-draft-tokens 1"):
        assert part in command
    assert "--unverified" in command and "--host-memory-floor 5" in command
    assert f"--parent {os.getpid()}" in command


@pytest.mark.parametrize(
    "arguments, kind, words",
    [
        (["--rank", "1"], UsageError, "--ranks is needed"),
        (["--local", "--rank", "1", "--ranks", "1"], UsageError, "--local starts all ranks"),
        (["--host-memory-floor", "100TiB"], errors.MemoryFloorError, "MiB required"),
        (["--kv-cache-limit", "100TiB"], errors.MemoryFloorError, "MiB required"),
        (["--mtp-draft-tokens", "9"], UsageError, "--mtp-draft-tokens is 9; accepted: 0 to 2"),
        (["--host", "203.0.113.1"], UsageError, "cannot listen on 203.0.113.1 port 0"),
        (["--api-key-file", "/nonexistent"], UsageError, "cannot read the key"),
    ],
)
def test_what_cannot_be_served_ends_with_its_code(arguments, kind, words, alone, capsys):
    code = outcome(flare, ["run", str(alone), "--gpus", "cpu", "--port", "0", *arguments])
    said = capsys.readouterr().err
    assert code == kind.exit_code, said
    assert words in said.splitlines()[-1]


def test_a_port_in_use_is_said_before_anything_is_loaded(alone, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = outcome(flare, ["run", str(alone), "--gpus", "cpu", "--port", str(port)])
    said = capsys.readouterr().err
    assert code == UsageError.exit_code
    assert f"port {port}: Address already in use" in said and "phase=" not in said


def test_one_flipped_byte_is_refused_by_tensor(alone, tmp_path, capsys):
    package = tmp_path / "flipped"
    shutil.copytree(alone, package)
    file = package / "model.safetensors"
    place = read_header(file).container.tensors["norm.weight"].offset
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    code = outcome(flare, ["run", str(package), "--gpus", "cpu", "--port", "0"])
    assert code == PackageError.exit_code
    assert "norm.weight is altered" in capsys.readouterr().err.splitlines()[-1]


# --- as processes ---------------------------------------------------------------------------


def test_one_rank_answers_and_ends_well_on_sigterm(alone, start):
    server = start(alone)
    url = server.ready()
    choice = complete(url, [1, 2, 3, 4, 5])
    assert len(choice["logprobs"]["top_logprobs"][0]) == 20
    for event in ("Plan cache", "Allocate cache", "budget_mib=", "floor_mib=1024", "tokens="):
        assert event in server.said
    server.process.terminate()
    assert server.process.wait(30) == 0, server.said
    assert server.process.stdout.read() == ""
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.rsplit(":", 1)[1]))) != 0


@pytest.mark.slow
def test_three_local_ranks_answer_as_one_and_end_together(three, alone, start):
    server, single = start(three, "--local"), start(alone)
    urls = server.ready(), single.ready()
    answers = [complete(url, list(range(40)), 5)["logprobs"] for url in urls]
    assert answers[0] == answers[1]
    pids = server.children
    assert sorted(pids) == [1, 2]
    server.process.terminate()
    assert server.process.wait(30) == 0, server.said
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("phase", ["load", "warm up", "serve"])
def test_a_lost_rank_ends_all_within_30_s_and_is_named(three, start, number, phase):
    server = start(three, "--local")
    server.wait_for(f'phase="{phase}"')
    pids = server.children
    begin = time.monotonic()
    os.kill(pids[1], number)
    code = server.process.wait(60)
    assert time.monotonic() - begin < 30
    assert code == errors.PeerLostError.exit_code, server.said
    assert "rank 1" in server.said.splitlines()[-1]
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


@pytest.mark.slow
def test_ranks_of_a_killed_rank_0_end_as_well(three, start):
    server = start(three, "--local")
    server.ready()
    pids = server.children
    server.process.kill()
    server.process.wait()
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids.values()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["rendezvous", "load", "warm up"])
def test_sigterm_in_a_start_phase_ends_all(three, start, phase):
    server = start(three, "--local")
    server.wait_for(f'phase="{phase}"')
    server.process.terminate()
    assert server.process.wait(30) in (0, 143), server.said
    assert not psutil.Process().children(recursive=True)
