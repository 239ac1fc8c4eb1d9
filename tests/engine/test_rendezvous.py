"""Ranks meet, agree or refuse, and notice who is gone: real processes and sockets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.errors import PeerLostError, RendezvousError
from engine.link import INBOX_BYTES_MAX
from engine.meeting import ends_with
from engine.rendezvous import ANY, meet, parse_address

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Ranks:
    """Processes of `meeting_process.py`; whatever still runs at the end is killed."""

    def __init__(self, address):
        self.address = address
        self.processes = []

    def start(self, rank, ranks=3, action="idle", silence=1):
        arguments = [rank, ranks, self.address, "s", 60, "{}"]
        command = [sys.executable, str(Path(__file__).parent / "meeting_process.py")]
        process = subprocess.Popen(
            [*command, *map(str, arguments), action, str(silence)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.processes.append(process)
        return process

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture
def ranks(address):
    started = Ranks(address)
    yield started
    started.end()


def said(process, timeout_s=25):
    """The last line that a rank printed, once it has ended."""
    output, _ = process.communicate(timeout=timeout_s)
    return json.loads(output.splitlines()[-1])


def wait_until_met(*processes):
    for process in processes:
        assert "met" in json.loads(process.stdout.readline())


def port_is_free(address):
    host, port = address.split(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, int(port)))
    return True


def meet_in_threads(address, *cards, timeout_s=10.0, secret="s", ranks=None):
    """`meet` for each (rank, options) in a thread of this process; meetings or errors by place."""
    found = [None] * len(cards)

    def work(place, rank, options):
        try:
            found[place] = meet(rank, ranks or len(cards), address, options, secret, timeout_s)
        except RendezvousError as error:
            found[place] = error

    threads = [
        threading.Thread(target=work, args=(place, *card)) for place, card in enumerate(cards)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 10)
    return found


@pytest.fixture
def pair(address):
    meetings = meet_in_threads(address, (0, {}), (1, {}))
    yield meetings
    for meeting in meetings:
        meeting.close()


# --- coming together ------------------------------------------------------------------------


def test_processes_meet_and_sum_by_a_collective(ranks, address):
    started = [ranks.start(rank, 2, action="reduce") for rank in range(2)]
    # Loading the tensor library takes most of the time, and long on a busy machine.
    assert [said(process, 120)["result"] for process in started] == ["3.0"] * 2
    assert port_is_free(address)


def test_messages_arrive_whole_and_in_order_both_ways(pair):
    first, second = pair
    large = os.urandom(3_000_000)
    first.links[1].send(b"one")
    first.links[1].send(large)
    second.links[0].send(b"")
    assert second.links[0].receive(5) == b"one"
    assert second.links[0].receive(5) == large
    assert first.links[1].receive(5) == b""


def test_one_rank_alone_meets_nobody_and_opens_no_port(address):
    meeting = meet(0, 1, address, {}, "s")
    assert meeting.links == {}
    meeting.close()


def test_closing_leaves_no_thread_and_no_port(address):
    before = threading.active_count()
    for meeting in meet_in_threads(address, (0, {}), (1, {})):
        meeting.close()
    assert threading.active_count() == before
    assert port_is_free(address)


def test_a_late_listener_is_waited_for(address):
    found = []
    caller = threading.Thread(target=lambda: found.append(meet(1, 2, address, {}, "s", 10)))
    caller.start()
    time.sleep(0.4)
    found.append(meet(0, 2, address, {}, "s", 10))
    caller.join()
    assert {meeting.rank for meeting in found} == {0, 1}
    for meeting in found:
        meeting.close()


# --- refusals -------------------------------------------------------------------------------


def test_missing_ranks_are_named_after_a_bounded_wait(address):
    start = time.monotonic()
    errors = meet_in_threads(address, (0, {}), (2, {}), timeout_s=0.6, ranks=4)
    assert time.monotonic() - start < 4
    for error in errors:
        assert "ranks 1 and 3 did not come" in str(error)


def test_rank_0_missing_is_named_after_a_bounded_wait(address):
    with pytest.raises(RendezvousError, match="rank 0 is missing.* within 0.4 s"):
        meet(1, 2, address, {}, "s", timeout_s=0.4)


def test_two_ranks_with_one_number_are_refused_at_once(address):
    start = time.monotonic()
    errors = meet_in_threads(address, (0, {}), (1, {}), (1, {}), timeout_s=20)
    assert time.monotonic() - start < 5
    assert all("two ranks have number 1" in str(error) for error in errors)


def test_a_second_rank_0_cannot_listen(address):
    taken = socket.create_server(("127.0.0.1", int(address.split(":")[1])))
    with taken, pytest.raises(RendezvousError, match="rank 0 cannot listen.*[Aa]ddress already"):
        meet(0, 2, address, {}, "s")


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_out_of_range_is_refused(rank, address):
    with pytest.raises(RendezvousError, match=f"rank is {rank}; accepted: 0 to 2 of 3"):
        meet(rank, 3, address, {}, "s")


def test_ranks_that_count_differently_refuse_by_name(address):
    found = [None, None]

    def work(rank, ranks):
        with pytest.raises(RendezvousError) as caught:
            meet(rank, ranks, address, {}, "s", 8)
        found[rank] = str(caught.value)

    threads = [threading.Thread(target=work, args=card) for card in ((0, 2), (1, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("option ranks differs: 2 on rank 0, 3 on rank 1" in text for text in found)


def test_every_rank_refuses_and_names_each_option_that_differs(address):
    options = {"prefill_chunk": 4096, "scratch": "planned", "recipe": "ab"}
    errors = meet_in_threads(
        address, (0, options), (1, options | {"prefill_chunk": 2048}), (2, options | {"more": True})
    )
    for error in errors:
        assert "option prefill_chunk differs: 4096 on ranks 0 and 2; 2048 on rank 1" in str(error)
        assert "option more differs: not given on ranks 0 and 1; true on rank 2" in str(error)
        assert "scratch" not in str(error)


def test_a_rank_with_another_secret_is_refused_and_not_seated(address):
    errors = [None, None]

    def work(rank, secret):
        try:
            meet(rank, 2, address, {}, secret, 1.5)
        except RendezvousError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=work, args=card) for card in ((0, "a"), (1, "b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "rank 1 did not come" in errors[0] and "refused callers: 127.0.0.1" in errors[0]
    assert "the secret is not that of rank 0" in errors[1]


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64])
def test_a_stranger_holds_nobody_up(address, noise):
    host, port = address.split(":")
    stranger = socket.socket()

    def disturb():
        for _ in range(50):
            with contextlib.suppress(ConnectionRefusedError):
                stranger.connect((host, int(port)))
                stranger.sendall(noise)
                return
            time.sleep(0.02)

    thread = threading.Thread(target=disturb)
    thread.start()
    meetings = meet_in_threads(address, (0, {}), (1, {}))
    thread.join()
    stranger.close()
    assert all(not isinstance(meeting, RendezvousError) for meeting in meetings), meetings
    for meeting in meetings:
        meeting.close()


def test_a_listener_without_the_secret_is_refused_by_the_caller(address):
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as listener:

        def pretend():
            sock, _ = listener.accept()
            from engine.rendezvous import PROTOCOL, _hear, _say

            _say(sock, {"protocol": PROTOCOL, "nonce": "00"})
            _hear(sock)
            _say(sock, {"proof": "guess"})
            time.sleep(0.5)
            sock.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(RendezvousError, match="does not know the secret"):
            meet(1, 2, address, {}, "s", 5)
        thread.join()


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:-1"])
def test_an_address_without_host_or_port_is_refused(text):
    with pytest.raises(RendezvousError, match="HOST:PORT"):
        parse_address(text)


def test_an_ipv6_address_is_read_and_written_in_brackets():
    parsed = parse_address("[::1]:29500")
    assert (parsed.host, parsed.port, str(parsed)) == ("::1", 29500, "[::1]:29500")


def test_a_rank_without_an_opinion_takes_what_rank_0_has(address):
    meetings = meet_in_threads(address, (0, {"package": "ab"}), (1, {"package": ANY}))
    assert [meeting.rank for meeting in meetings] == [0, 1]
    for meeting in meetings:
        meeting.close()


# --- losing a rank --------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_by_all_others(ranks, address, victim):
    started = [ranks.start(rank) for rank in range(3)]
    wait_until_met(*started)
    start = time.monotonic()
    started[victim].kill()
    for process in [p for rank, p in enumerate(started) if rank != victim]:
        answer = said(process)
        assert answer["kind"] == "PeerLostError"
        assert f"rank {victim} is gone" in answer["error"]
    assert time.monotonic() - start < 5
    assert port_is_free(address)


def test_a_stopped_rank_is_named_by_all_others_within_the_silence_limit(ranks):
    started = [ranks.start(rank, silence=2) for rank in range(3)]
    wait_until_met(*started)
    start = time.monotonic()
    os.kill(started[1].pid, signal.SIGSTOP)
    for process in (started[0], started[2]):
        assert "rank 1 is gone: no sign of life" in said(process)["error"]
    assert time.monotonic() - start < 12


def test_a_sender_held_up_by_a_stopped_rank_is_released(ranks):
    started = [
        ranks.start(0, 2, action="flood", silence=2),
        ranks.start(1, 2, action="hold", silence=2),
    ]
    wait_until_met(*started)
    os.kill(started[1].pid, signal.SIGSTOP)
    assert "rank 1 is gone: no sign of life" in said(started[0])["error"]


def test_a_rank_that_fails_tells_the_others_why(ranks):
    started = [ranks.start(rank, action="fail" if rank == 2 else "idle") for rank in range(3)]
    for process in started[:2]:
        assert said(process)["error"] == "rank 2 is gone: ValueError: the package is torn"


def test_a_slow_reader_is_no_lost_rank(address):
    meetings = meet_in_threads(address, (0, {}), (1, {}))
    for meeting in meetings:
        meeting.silence_s = 0.4
    chunk = bytes(2**22)
    count = INBOX_BYTES_MAX // len(chunk) + 4
    sender = threading.Thread(
        target=lambda: [meetings[0].links[1].send(chunk) for _ in range(count)]
    )
    sender.start()
    time.sleep(1.2)
    assert [len(meetings[1].links[0].receive(5)) for _ in range(count)] == [len(chunk)] * count
    sender.join()
    for meeting in meetings:
        meeting.check()
        meeting.close()


def test_an_orderly_goodbye_is_no_loss_until_the_rank_is_needed(pair):
    first, second = pair
    second.close()
    with pytest.raises(PeerLostError, match="rank 1 has left"):
        first.links[1].receive(5)
    first.check()


def test_messages_sent_before_a_goodbye_still_arrive(pair):
    first, second = pair
    second.links[0].send(b"last words")
    second.close()
    assert first.links[1].receive(5) == b"last words"


def test_silence_of_a_healthy_rank_is_a_timeout_not_a_loss(pair):
    with pytest.raises(TimeoutError, match="rank 1 sent nothing within 0.05 s"):
        pair[0].links[1].receive(0.05)
    pair[0].check()


def test_a_rank_stuck_after_a_loss_is_ended(pair):
    first, second = pair
    ended = threading.Event()
    losses = []
    with ends_with(first, lambda loss: (losses.append(loss), ended.set()), grace_s=0.1):
        second.close("broken")
        assert ended.wait(5)
    assert [str(loss) for loss in losses] == ["rank 1 is gone: broken"]


def test_a_rank_that_comes_back_after_a_loss_is_not_ended(pair):
    first, second = pair
    losses = []
    with ends_with(first, losses.append, grace_s=0.3):
        second.close("broken")
    time.sleep(0.5)
    assert losses == []
