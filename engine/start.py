"""From a package to a running rank: agree, reserve, load; and how large the KV cache becomes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from engine.capacity import kv_capacity
from engine.config import ModelConfig
from engine.errors import MemoryFloorError, UsageError
from engine.hostmem import shortfall
from engine.meeting import Meeting
from engine.recipe import Recipe
from engine.units import MIB

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Equal for two processes exactly when they share a host's memory."""

Log = Callable[..., None]


@dataclass(frozen=True)
class HostTerms:
    """What a rank reads on its host when everything but weights and cache is set up.

    available_bytes  MemAvailable
    fixed_bytes      what the rank's map takes and has not taken yet
    host             equal for ranks that share memory
    """

    rank: int
    available_bytes: int
    fixed_bytes: int
    host: str


@dataclass(frozen=True)
class CachePlan:
    """The size of the KV cache with everything it follows from; bytes are those of each rank.

    budgets_bytes   what each rank may use, or the limit that was asked for
    asked_bytes     the limit that was asked for, None for all there is
    useful_tokens   all slots at the longest context; more would never be filled
    """

    terms: tuple[HostTerms, ...]
    floor_bytes: int
    budgets_bytes: tuple[int, ...]
    asked_bytes: int | None
    limiting_rank: int
    room_tokens: int
    useful_tokens: int
    page_tokens: int
    page_bytes: int

    @property
    def pages(self) -> int:
        """Pages to allocate on every rank."""
        if self.asked_bytes is not None:
            return self.room_tokens // self.page_tokens
        return min(self.room_tokens, self.useful_tokens) // self.page_tokens

    @property
    def tokens(self) -> int:
        """Tokens of the cache."""
        return self.pages * self.page_tokens

    def log(self, log: Log) -> None:
        """Every term, one line per rank and one for the result."""
        for terms, budget in zip(self.terms, self.budgets_bytes, strict=True):
            log(
                "Plan cache",
                of_rank=terms.rank,
                available_mib=terms.available_bytes // MIB,
                floor_mib=self.floor_bytes // MIB,
                fixed_mib=round(terms.fixed_bytes / MIB, 3),
                sharing_host=sum(other.host == terms.host for other in self.terms),
                budget_mib=budget // MIB,
            )
        log(
            "Allocate cache",
            limit="memory" if self.asked_bytes is None else self.asked_bytes,
            limiting_rank=self.limiting_rank,
            room_tokens=self.room_tokens,
            useful_tokens=self.useful_tokens,
            bytes_per_token=float(Fraction(self.page_bytes, self.page_tokens)),
            pages=self.pages,
            tokens=self.tokens,
            cache_mib=round(self.pages * self.page_bytes / MIB, 3),
        )


def host_id(path: Path = BOOT_ID) -> str:
    """Names the host whose memory this process uses."""
    try:
        return path.read_text().strip()
    except OSError:
        # Without it ranks count as sharing if they report one host name, the cautious reading.
        return os.uname().nodename


def budgets(terms: Sequence[HostTerms], floor_bytes: int) -> list[int]:
    """Bytes that each rank may use for its cache: its share of what its host has left.

    available - floor - what all ranks of the host still take, dealt evenly among them.
    """
    found = []
    for own in terms:
        sharing = [other for other in terms if other.host == own.host]
        available = min(other.available_bytes for other in sharing)
        left = available - floor_bytes - sum(other.fixed_bytes for other in sharing)
        found.append(left // len(sharing))
    return found


def plan_cache(
    terms: Sequence[HostTerms],
    floor_bytes: int,
    kv: Mapping[str, object],
    config: ModelConfig,
    recipe: Recipe,
    limit_bytes: int | None,
) -> CachePlan:
    """How many pages every rank allocates.

    kv: the facts of the memory map. The rings and open groups are fixed memory already, so no
    further part is taken from the budget. Raises MemoryFloorError with both figures where a rank
    has no room, and UsageError where the cache could not hold a single page.
    """
    own = budgets(terms, floor_bytes)
    for rank, budget in enumerate(own):
        if budget <= 0:
            needed = floor_bytes + sum(t.fixed_bytes for t in terms if t.host == terms[rank].host)
            have = terms[rank].available_bytes
            raise MemoryFloorError(f"host memory of rank {rank}: {shortfall(have, needed)}")
    page_tokens, page_bytes = int(kv["page_tokens"]), int(kv["page_bytes"])
    if page_bytes == 0:
        raise UsageError("the model keeps no compressed cache, so there is nothing to page")
    per_token = Fraction(page_bytes, page_tokens)
    capacity = kv_capacity(own, [0] * len(own), per_token, page_tokens, limit_bytes)
    pages_each = -(-config.max_position_embeddings // page_tokens)
    return CachePlan(
        terms=tuple(terms),
        floor_bytes=floor_bytes,
        budgets_bytes=tuple(own),
        asked_bytes=limit_bytes,
        limiting_rank=capacity.limiting_rank,
        room_tokens=capacity.tokens,
        useful_tokens=recipe.max_concurrency * pages_each * page_tokens,
        page_tokens=page_tokens,
        page_bytes=page_bytes,
    )


def agree_on_pages(
    meeting: Meeting, own: HostTerms, plan: Callable[[Sequence[HostTerms]], CachePlan]
) -> tuple[int, CachePlan | None]:
    """Rank 0 collects the terms of all ranks and tells them the pages; the plan on rank 0 only.

    The pool is replicated, so every rank allocates what the tightest has room for.
    """
    if meeting.rank:
        link = meeting.links[0]
        link.send(json.dumps(asdict(own)).encode())
        return int(json.loads(link.receive())["pages"]), None
    terms = [own]
    for link in meeting.links.values():
        terms.append(HostTerms(**json.loads(link.receive())))
    found = plan(terms)
    for link in meeting.links.values():
        link.send(json.dumps({"pages": found.pages}).encode())
    return found.pages, found
