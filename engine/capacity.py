"""How many tokens a KV cache holds: whole pages of what is left of a budget, least of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from engine.errors import MemoryFloorError
from engine.hostmem import shortfall


def kv_capacity_tokens(
    budget_bytes: int, fixed_bytes: int, bytes_per_token: int | Fraction, page_tokens: int
) -> int:
    """Tokens of a rank: page * floor((budget - fixed) / bytes_per_token / page); 0 without room.

    fixed_bytes are taken from the budget whatever the number of tokens (window rings, tables).
    """
    assert bytes_per_token > 0 and page_tokens > 0, f"{bytes_per_token=} {page_tokens=}"
    assert isinstance(bytes_per_token, int | Fraction), f"{bytes_per_token!r} is not exact"
    pages = (budget_bytes - fixed_bytes) // (bytes_per_token * page_tokens)
    return page_tokens * max(0, int(pages))


@dataclass(frozen=True)
class KvCapacity:
    """Tokens that each rank has room for; the latent is replicated, so the least counts."""

    tokens_per_rank: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the cache."""
        return min(self.tokens_per_rank)

    @property
    def limiting_rank(self) -> int:
        """The first rank with the least room."""
        return self.tokens_per_rank.index(self.tokens)


def kv_capacity(
    budgets_bytes: Sequence[int],
    fixed_bytes: Sequence[int],
    bytes_per_token: int | Fraction,
    page_tokens: int,
    limit_bytes: int | None = None,
) -> KvCapacity:
    """The cache that the ranks' budgets allow, or exactly the one asked for with `limit_bytes`.

    budgets_bytes, fixed_bytes: of each rank. A limit replaces every budget as it is: it is granted
    or refused, never reduced. Raises MemoryFloorError naming the rank, MiB available and required,
    where a limit is above a rank's budget or there is no room for one page.
    """
    assert len(budgets_bytes) == len(fixed_bytes) > 0, f"{budgets_bytes} and {fixed_bytes}"
    tokens = []
    for rank, (budget, fixed) in enumerate(zip(budgets_bytes, fixed_bytes, strict=True)):
        if limit_bytes is not None and limit_bytes > budget:
            raise MemoryFloorError(
                f"KV cache of {limit_bytes} bytes on rank {rank}: {shortfall(budget, limit_bytes)}"
            )
        granted = budget if limit_bytes is None else limit_bytes
        held = kv_capacity_tokens(granted, fixed, bytes_per_token, page_tokens)
        if held == 0:
            needed = fixed + -(-bytes_per_token * page_tokens // 1)
            raise MemoryFloorError(
                f"KV cache on rank {rank}, one page of {page_tokens} tokens: "
                f"{shortfall(granted, int(needed))}"
            )
        tokens.append(held)
    return KvCapacity(tuple(tokens))
