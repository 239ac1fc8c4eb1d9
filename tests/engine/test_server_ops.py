"""Health, metrics, vanishing clients, shutdown, and an engine that stalls or dies."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from engine.errors import PeerLostError
from fixtures.toy_core import ToyCore
from tests.engine.serving import PAGE, SHAPE, alone, prompt
from tests.engine.serving_child import Slow
from tests.engine.web import Gated, events, serving, wait_until

IDS = prompt(1, 20)
LONG = {"prompt": list(IDS), "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_gives_back_all_pages(stream):
    with serving(Slow(**SHAPE), prefix_cache_memory_bytes=0) as running:
        url = running.http.base_url
        body = httpx.Request("POST", url, json={**LONG, "n": 3, "stream": stream}).content
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection((url.host, url.port)) as client:
            client.sendall(head.encode() + body)
            if stream:
                assert b"200" in client.recv(20)
            wait_until(lambda: running.metric("flare_used_kv_tokens") > 0)
        running.settle()
        assert running.metric("flare_requests_total", reason="cancelled") == 3
        assert running.metric("flare_free_kv_tokens") == running.metric("flare_total_kv_tokens")


def test_a_client_that_vanishes_while_it_waits_leaves_the_queue():
    core = Gated(slots=1)
    with serving(core) as running:
        core.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            running.http.post("/v1/completions", json={**LONG, "n": 4}, timeout=0.2)
        wait_until(lambda: running.service.loop._inbox == [])
        core.gate.set()
        running.settle()
        assert running.complete(IDS)


def test_health_is_green_when_steps_end_and_an_idle_engine_proves_itself():
    with serving(probe_seconds=0.0) as running:
        assert running.http.get("/health").json() == {"status": "ok"}
        assert running.core.steps == 1
        running.http.get("/health")
        assert running.core.steps == 2
        assert running.metric("flare_generation_tokens_total") == 0
        assert running.metric("flare_requests_total", reason="length") == 0


def test_health_turns_red_while_a_step_is_stuck_and_waiting_requests_are_told():
    core = Gated()
    with serving(core, stall_seconds_max=0.2) as running:
        core.gate.clear()
        with pytest.raises(openai.InternalServerError, match="a step has not ended for"):
            running.openai.completions.create(model="toy", prompt=list(IDS))
        answer = running.http.get("/health")
        assert answer.status_code == 503
        assert "0.2 s are allowed" in answer.json()["reason"]
        core.gate.set()
        running.settle()
        assert running.http.get("/health").status_code == 200


def test_health_turns_red_when_an_idle_engine_cannot_step():
    core = Gated()
    with serving(core, stall_seconds_max=0.2, probe_seconds=0.0) as running:
        core.gate.clear()
        began = time.monotonic()
        assert running.http.get("/health").status_code == 503
        assert time.monotonic() - began < 5
        core.gate.set()


class Dying(ToyCore):
    """Loses a peer at its fourth step."""

    def step(self, sequences):
        time.sleep(0.05)
        if self.steps == 3:
            raise PeerLostError("rank 2 has ended")
        return super().step(sequences)


def test_a_lost_core_fails_every_request_names_the_cause_and_ends_the_server():
    core = Dying(**{**SHAPE, "slots": 1})
    with serving(core, fails=PeerLostError) as running:
        failures = []

        def one():
            answer = running.http.post("/v1/completions", json=LONG)
            failures.append((answer.status_code, answer.json()["error"]["message"]))

        threads = [threading.Thread(target=one) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(failures) == 3
        assert {status for status, _ in failures} == {503}
        assert all("rank 2 has ended" in message for _, message in failures)


def test_a_stream_that_breaks_in_the_middle_says_so():
    with serving(Dying(**SHAPE), fails=PeerLostError) as running:
        documents = events(running.http.post("/v1/completions", json={**LONG, "stream": True}))
        assert documents[-1]["error"]["message"] == "rank 2 has ended"


def test_a_fault_of_ours_is_a_500_in_the_same_shape(monkeypatch):
    with serving() as running:
        monkeypatch.setattr("engine.app.read_completion", lambda *args: 1 / 0)
        answer = running.http.post("/v1/completions", json=LONG)
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"


def start(directory):
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.serving_child", str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    return child, child.stdout.readline().strip()


def test_sigterm_lets_a_stream_end_then_closes_and_a_restart_hits_the_disk(tmp_path):
    child, url = start(tmp_path)
    with httpx.Client(base_url=url) as client:
        body = {**LONG, "max_tokens": 60, "stream": True, "return_token_ids": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]" and len(rest) > 60
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    assert child.stdout.read() == "closed\n" and child.wait(10) == 0
    child.stdout.close()
    again, url = start(tmp_path)
    with httpx.Client(base_url=url) as client:
        found = client.post("/v1/completions", json={**LONG, "max_tokens": 4}).json()
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * PAGE
        assert "".join(f"token_id:{i}" for i in alone(IDS, 4)) == found["choices"][0]["text"]
        again.send_signal(signal.SIGINT)
    assert again.wait(10) == 0
    again.stdout.close()


def test_draining_is_bounded():
    core = Gated()
    with serving(core, drain_seconds_max=1) as running:
        core.gate.clear()
        thread = threading.Thread(target=lambda: _expect_trouble(running))
        thread.start()
        wait_until(lambda: running.service.loop._turn_began_s is not None)
        running.service.stop()
        thread.join(10)
        assert not thread.is_alive()
        core.gate.set()


def _expect_trouble(running):
    with pytest.raises((httpx.HTTPError, openai.APIError)):
        running.http.post("/v1/completions", json=LONG).raise_for_status()


def moves(running, act, *names, **labels):
    before = [running.metric(name, **labels) for name in names]
    act()
    after = [running.metric(name, **labels) for name in names]
    return [b - a for a, b in zip(before, after, strict=True)]


def test_every_metric_is_there_from_the_start():
    names = {
        "flare_total_kv_tokens", "flare_free_kv_tokens", "flare_cached_kv_tokens",
        "flare_used_kv_tokens", "flare_requests_running", "flare_requests_waiting",
        "flare_prompt_tokens_total", "flare_generation_tokens_total", "flare_preemptions_total",
        "flare_requests_total", "flare_refusals_total", "flare_prefix_query_tokens_total",
        "flare_prefix_hit_tokens_total", "flare_prefix_evicted_pages_total", "flare_prefix_bytes",
        "flare_prefix_disk_blocks_total", "flare_prefix_disk_errors_total",
        "flare_draft_proposed_total", "flare_draft_accepted_total", "flare_step_seconds_count",
        "flare_time_to_first_token_seconds_count",
    }  # fmt: skip
    with serving(ToyCore(**{**SHAPE, "draft_tokens": 2})) as running:
        lines = running.http.get("/metrics").text.splitlines()
        found = {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")}
        assert names <= found
        histograms = ("_bucket", "_sum", "_count", "_created")
        assert {n for n in found if not n.endswith(histograms)} <= names, "add it to this test"


def test_token_and_step_metrics_move_by_what_was_done():
    core = ToyCore(**{**SHAPE, "draft_tokens": 2, "draft_skill": 1.0})
    with serving(core) as running:

        def act():
            running.complete(IDS, max_tokens=7, ignore_eos=True)

        names = ("flare_prompt_tokens_total", "flare_generation_tokens_total")
        assert moves(running, act, *names) == [20, 7]
        assert moves(running, act, "flare_requests_total", reason="length") == [1]
        assert moves(running, act, "flare_step_seconds_count", kind="decode") != [0]
        other = prompt(9, 40)
        steps = moves(
            running, lambda: running.complete(other), "flare_step_seconds_count", kind="prefill"
        )
        assert steps == [5]  # 40 ids, cut at each page border
        assert moves(running, act, "flare_time_to_first_token_seconds_count") == [1]
        drafts = ("flare_draft_proposed_total", "flare_draft_accepted_total")
        assert moves(running, act, *drafts, position="0") == [2, 2]
        assert moves(running, act, *drafts, position="1") == [1, 1]


def test_pages_add_up_on_metrics_at_every_moment():
    with serving(Slow(**SHAPE)) as running:
        done = threading.Event()

        def work():
            running.http.post("/v1/completions", json={**LONG, "max_tokens": 60, "n": 4})
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        seen = []
        while not done.is_set():
            text = running.http.get("/metrics").text.splitlines()
            value = {line.split(" ")[0]: float(line.split(" ")[1]) for line in text
                     if line.startswith("flare_") and "{" not in line}  # fmt: skip
            parts = [value[f"flare_{part}_kv_tokens"] for part in ("free", "cached", "used")]
            assert sum(parts) == value["flare_total_kv_tokens"] == 64 * PAGE
            seen.append((value["flare_requests_running"], parts[2] > 0))
        thread.join()
        assert (4.0, True) in seen
        running.settle()
        assert running.metric("flare_cached_kv_tokens") > 0


def test_waiting_and_preemption_show_on_metrics():
    core = Gated(pages=12, slots=4)
    with serving(core, prefix_cache_memory_bytes=0) as running:
        core.gate.clear()
        body = {**LONG, "prompt": [list(prompt(n, 30)) for n in range(4)], "max_tokens": 40}
        thread = threading.Thread(target=lambda: running.http.post("/v1/completions", json=body))
        thread.start()
        wait_until(lambda: running.service.loop._turn_began_s is not None)
        core.gate.set()
        core.gate.clear()
        wait_until(lambda: running.metric("flare_requests_waiting") > 0)
        core.gate.set()
        thread.join()
        running.settle()
        assert running.metric("flare_preemptions_total") > 0


def test_prefix_metrics_move(tmp_path):
    core = ToyCore(**{**SHAPE, "pages": 12})
    options = {"prefix_cache_disk": tmp_path, "package_hash": "toy"}
    with serving(core, **options) as running:
        names = ("flare_prefix_query_tokens_total",)
        assert moves(running, lambda: running.complete(IDS), *names) == [2 * PAGE]
        hit = moves(
            running, lambda: running.complete(IDS), "flare_prefix_hit_tokens_total", source="memory"
        )
        assert hit == [2 * PAGE]
        assert running.metric("flare_prefix_bytes", place="memory") > 0
        running.complete(prompt(5, 85), max_tokens=8)
        assert running.metric("flare_prefix_evicted_pages_total") > 0
        running.service.disk.flush()
        assert running.metric("flare_prefix_disk_blocks_total", event="written") > 0
        assert running.metric("flare_prefix_bytes", place="disk") > 0
        hit = moves(
            running, lambda: running.complete(IDS), "flare_prefix_hit_tokens_total", source="disk"
        )
        assert hit == [2 * PAGE]
        assert running.metric("flare_prefix_disk_blocks_total", event="read") > 0
        for block in tmp_path.glob("*.page.block"):
            block.write_bytes(b"")
        running.complete(prompt(6, 85), max_tokens=8)
        running.complete(IDS)
        assert running.metric("flare_prefix_disk_errors_total", kind="corrupt") > 0


def test_refusals_and_ends_are_counted_by_kind():
    with serving() as running:
        refused = moves(
            running,
            lambda: running.http.post("/v1/completions", content=b"x"),
            "flare_refusals_total",
            status="400",
        )
        assert refused == [1]
        stop = alone(IDS, 3)[0]
        ended = moves(
            running,
            lambda: running.complete(IDS, stop_token_ids=[stop]),
            "flare_requests_total",
            reason="stop",
        )
        assert ended == [1]


def test_a_server_leaves_no_thread_behind():
    before = threading.active_count()
    with serving() as running:
        running.complete(IDS)
    wait_until(lambda: threading.active_count() <= before)
    assert os.getpid() > 0
