"""One rank as a process for the rendezvous tests: meets, does one thing, prints what came of it."""

from __future__ import annotations

import json
import sys
import time

from engine.errors import SparkproofError
from engine.rendezvous import meet


def idle(meeting) -> str:
    """Wait for a message that never comes, and say what ended the wait."""
    print(json.dumps({"met": meeting.rank}), flush=True)
    link = next(iter(meeting.links.values()))
    return link.receive(30).decode()


def hold(meeting) -> str:
    """Stay without looking at messages."""
    print(json.dumps({"met": meeting.rank}), flush=True)
    time.sleep(60)
    return "held"


def flood(meeting) -> str:
    """Send until it cannot go on."""
    print(json.dumps({"met": meeting.rank}), flush=True)
    while True:
        for link in meeting.links.values():
            link.send(bytes(2**22))


def reduce(meeting) -> str:
    """Sum the rank numbers by a collective."""
    import torch
    import torch.distributed as dist

    meeting.init_process_group("gloo", timeout_s=100)
    value = torch.tensor([1.0 + meeting.rank], dtype=torch.float64)
    dist.all_reduce(value)
    return str(value.item())


def fail(meeting) -> str:
    """Give up with a reason."""
    time.sleep(0.2)
    raise ValueError("the package is torn")


def main() -> None:
    """argv: rank ranks address secret timeout_s options(JSON) action silence_s."""
    rank, ranks, address, secret, timeout_s, options, action, silence_s = sys.argv[1:]
    start = time.monotonic()
    try:
        meeting = meet(
            int(rank), int(ranks), address, json.loads(options), secret, float(timeout_s)
        )
        meeting.silence_s = float(silence_s)
        with meeting:
            result = {"result": globals()[action](meeting)}
    except (SparkproofError, ValueError) as error:
        result = {"error": str(error), "kind": type(error).__name__}
    print(json.dumps(result | {"took_s": time.monotonic() - start}), flush=True)


if __name__ == "__main__":
    main()
