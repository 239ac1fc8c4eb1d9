"""Helpers of the serving tests: a sink that remembers, toy schedulers, and the reference run."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache

from engine.kvcache import PagePool
from engine.prefix import PrefixCache
from engine.sampler import Sampling
from engine.scheduler import Scheduler
from engine.sequence import Request, Token
from fixtures.toy_core import ToyCore

GREEDY = Sampling(temperature=0)
PAGE = 8
SHAPE = {"page_tokens": PAGE, "window": 6, "vocab_size": 96, "positions_max": 512}


@dataclass
class Recorder:
    """A sink that keeps everything; `stop_after` tokens it asks for the end."""

    stop_after: int | None = None
    tokens: list[Token] = field(default_factory=list)
    rows: list[tuple] = field(default_factory=list)
    reason: str | None = None
    cached: int = 0

    def prompt(self, position, logprobs):
        self.rows.append((position, logprobs))

    def token(self, token):
        assert self.reason is None, "a token after the end"
        self.tokens.append(token)
        return self.stop_after is not None and len(self.tokens) >= self.stop_after

    def end(self, reason, cached_tokens):
        assert self.reason is None, "ended twice"
        self.reason, self.cached = reason, cached_tokens

    @property
    def ids(self):
        return [token.id for token in self.tokens]


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Ids of a made-up prompt; two lengths of one seed share their beginning."""
    rng = random.Random(seed)
    return tuple(rng.randrange(2, SHAPE["vocab_size"]) for _ in range(length))


def build(core=None, limit_bytes=0, disk=None, identity="test", **options) -> Scheduler:
    """A scheduler over a toy core; `limit_bytes` is the prefix cache's."""
    core = core or ToyCore(**SHAPE)
    pool = PagePool(core.pages)
    prefix = PrefixCache(core, pool, limit_bytes, identity, disk)
    return Scheduler(core, prefix, history_tokens=3, **options)


def finish(scheduler: Scheduler, steps_max: int = 5000) -> None:
    """Step until idle, checking conservation after each step."""
    for _ in range(steps_max):
        if not scheduler.busy:
            scheduler.check_idle()
            return
        scheduler.step()
        scheduler.check()
    raise AssertionError(f"still busy after {steps_max} steps")


def run(scheduler: Scheduler, *requests: Request) -> list[Recorder]:
    """Submit all at once and run to the end."""
    for request in requests:
        scheduler.submit(request)
    finish(scheduler)
    return [request.sink for request in requests]


def ask(ids, max_tokens=8, sampling=GREEDY, **more) -> Request:
    """A request with a recorder of its own."""
    return Request(tuple(ids), max_tokens, more.pop("sink", Recorder()), sampling, **more)


@lru_cache(maxsize=4096)
def alone(ids: tuple[int, ...], max_tokens: int, sampling: Sampling = GREEDY) -> list[int]:
    """What a request brings alone: cold, without drafts, cache or company."""
    return run(build(), ask(ids, max_tokens, sampling))[0].ids
