"""Local ranks start, talk, fail by name and never outlive whoever started them."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine.errors import PeerLostError
from engine.launch import LocalRanks, bind_to_parent, share_threads

ROOT = Path(__file__).resolve().parents[2]
CHILD = "tests.engine.launch_child"


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def gone_within(pids, limit_s=5.0):
    deadline = time.monotonic() + limit_s
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def local_ranks(*actions, log=None, grace_s=3.0):
    commands = {rank: [CHILD, action] for rank, action in enumerate(actions, start=1)}
    return LocalRanks(commands, os.environ, log or io.StringIO(), grace_s)


def test_lines_of_a_rank_carry_its_number():
    log = io.StringIO()
    with local_ranks("hello", "hello", log=log) as ranks:
        ranks.wait(10)
    assert sorted(log.getvalue().splitlines()) == [
        "[rank 1] hello",
        "[rank 1] over stderr",
        "[rank 2] hello",
        "[rank 2] over stderr",
    ]


def test_a_failed_rank_is_named_with_its_exit_code_and_last_words():
    with local_ranks("hello", "fail") as ranks, pytest.raises(PeerLostError) as caught:
        ranks.wait(10)
    assert str(caught.value) == "rank 2 ended with exit code 5: error: the package is torn"
    assert caught.value.exit_code == 5


def test_a_killed_rank_is_named_with_its_signal():
    with local_ranks("sleep") as ranks:
        os.kill(ranks.pids[1], signal.SIGKILL)
        with pytest.raises(PeerLostError, match="rank 1 ended with signal SIGKILL"):
            ranks.wait(10)


def test_leaving_the_context_ends_every_rank():
    with local_ranks("sleep", "sleep") as ranks:
        pids = list(ranks.pids.values())
        assert all(map(alive, pids))
    assert not any(map(alive, pids))


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace():
    log = io.StringIO()
    with local_ranks("stubborn", log=log, grace_s=0.3) as ranks:
        pid = ranks.pids[1]
        while "ready" not in log.getvalue():
            time.sleep(0.02)
        start = time.monotonic()
    assert not alive(pid)
    assert 0.3 <= time.monotonic() - start < 3


def test_a_stopped_rank_is_ended_without_waiting_for_the_grace():
    with local_ranks("sleep", grace_s=20) as ranks:
        pid = ranks.pids[1]
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
    assert not alive(pid)
    assert time.monotonic() - start < 10


def test_after_an_error_ranks_are_given_time_to_say_their_own():
    log = io.StringIO()
    with pytest.raises(PeerLostError), local_ranks("slowly", log=log):
        raise PeerLostError("rank 2 is gone")
    assert "[rank 1] error: rank 2 is gone" in log.getvalue()


def test_waiting_is_bounded():
    with local_ranks("sleep") as ranks, pytest.raises(PeerLostError, match="did not end within"):
        ranks.wait(0.1)


def test_ranks_die_with_a_parent_that_is_killed():
    parent = subprocess.Popen(
        [sys.executable, "-m", CHILD, "parent"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with parent:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(map(alive, pids))
        parent.kill()
    assert gone_within(pids)


def test_a_child_whose_parent_is_already_gone_refuses_to_start():
    code = (
        "from engine.launch import bind_to_parent\n"
        "from engine.errors import PeerLostError\n"
        "try: bind_to_parent(1)\n"
        "except PeerLostError as error: print(error)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "pid 1) has ended" in answer.stdout


def test_threads_are_shared_out_but_a_choice_of_the_user_stays(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    shared = share_threads(1000)
    assert shared["OMP_NUM_THREADS"] == "1"
    assert shared["MKL_NUM_THREADS"] == "7"


def test_binding_to_the_parent_works_in_this_process():
    bind_to_parent(os.getppid())
