"""KV capacity recomputed from budget, fixed part and bytes per token, and claims judged by it.

It does not know the engine's own capacity function. Everything is exact: bytes are integers,
bytes per token a fraction, budgets as people write them intervals of what rounds to the figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from suites.findings import Finding

GIB = 1024**3
GB = 10**9
PAGE_TOKENS = 128


def kv_tokens(
    budget_bytes: int | Fraction,
    fixed_bytes: int | Fraction,
    bytes_per_token: int | Fraction,
    page_tokens: int = PAGE_TOKENS,
) -> int:
    """Whole pages of what the fixed part leaves of the budget, in tokens; 0 when nothing is left.

    tokens = page * floor((budget - fixed) / bytes_per_token / page), the formula that the seed
    report's totals follow.
    """
    room = Fraction(budget_bytes) - Fraction(fixed_bytes)
    if room < 0:
        return 0
    return page_tokens * (room // (Fraction(bytes_per_token) * page_tokens))


def entry_bytes(head_dim: int, index_head_dim: int) -> Fraction:
    """Bytes of one compressed entry: FP4 latent, E4M3 scale per 16, FP4 index key, E8M0 per 32."""
    latent = Fraction(head_dim, 2) + Fraction(head_dim, 16)
    return latent + Fraction(index_head_dim, 2) + Fraction(index_head_dim, 32)


def bytes_per_token(head_dim: int, index_head_dim: int, ratios: Sequence[int]) -> Fraction:
    """Bytes of one token over all KV sources, each keeping one entry per `ratio` tokens."""
    return entry_bytes(head_dim, index_head_dim) * sum(Fraction(1, ratio) for ratio in ratios)


@dataclass(frozen=True)
class Observed:
    """A total read off a running engine beside its budget as printed, such as 6.27 GiB."""

    budget_gib: str
    tokens: int

    @property
    def budgets(self) -> tuple[Fraction, Fraction]:
        """Bytes from the least budget that is printed so to before the least that is not."""
        digits = -Decimal(self.budget_gib).as_tuple().exponent
        half = Fraction(1, 2 * 10**digits)
        middle = Fraction(self.budget_gib)
        return (middle - half) * GIB, (middle + half) * GIB


def fixed_part(
    observations: Sequence[Observed],
    per_token: int | Fraction,
    page_tokens: int = PAGE_TOKENS,
) -> tuple[Fraction, Fraction] | None:
    """The fixed parts, in bytes, with which every total follows from a budget printed as it was.

    Between the two values, both excluded; None when no single fixed part explains all.
    """
    page_bytes = Fraction(per_token) * page_tokens
    lows, highs = [], []
    for observed in observations:
        if observed.tokens % page_tokens:
            return None
        least, most = observed.budgets
        pages = observed.tokens // page_tokens
        # tokens = floor((b - c) / page_bytes) pages for some b in [least, most).
        lows.append(least - (pages + 1) * page_bytes)
        highs.append(most - pages * page_bytes)
    low, high = max(lows), min(highs)
    return (low, high) if low < high else None


def page_budget(fixed_bytes: int, tokens: int, per_token: int | Fraction) -> Fraction:
    """The least budget, in bytes, that gives so many tokens."""
    return Fraction(fixed_bytes) + Fraction(per_token) * tokens


@dataclass(frozen=True)
class KvClaim:
    """What an engine says about its cache, with what it must follow from.

    budgets_bytes, fixed_bytes   of each rank
    requested_bytes, granted_bytes   of a cache size that was asked for; None where none was
    """

    tokens: int
    budgets_bytes: tuple[int, ...]
    fixed_bytes: tuple[int, ...]
    bytes_per_token: int | Fraction
    page_tokens: int = PAGE_TOKENS
    requested_bytes: int | None = None
    granted_bytes: int | None = None

    def __post_init__(self) -> None:
        assert len(self.budgets_bytes) == len(self.fixed_bytes) > 0, "one of each per rank"

    @property
    def tokens_per_rank(self) -> tuple[int, ...]:
        """What each rank has room for."""
        return self._tokens(1)

    def _tokens(self, scale: int | Fraction) -> tuple[int, ...]:
        return tuple(
            kv_tokens(budget * Fraction(scale), fixed, self.bytes_per_token, self.page_tokens)
            for budget, fixed in zip(self.budgets_bytes, self.fixed_bytes, strict=True)
        )


def check_claim(claim: KvClaim) -> Iterator[Finding]:
    """Whole pages, the least of the ranks, the right units, and no silent clamp."""
    per_rank = claim.tokens_per_rank
    least = min(per_rank)
    facts = {"tokens": claim.tokens, "tokens_per_rank": list(per_rank)}
    if claim.tokens % claim.page_tokens:
        yield Finding(
            "kv-page",
            "kv",
            f"{claim.tokens} tokens are no whole number of pages of {claim.page_tokens}",
            facts,
        )
    elif claim.tokens != least:
        yield _wrong_total(claim, per_rank, facts)
    requested, granted = claim.requested_bytes, claim.granted_bytes
    if requested is not None and granted is not None and granted < requested:
        yield Finding(
            "cache-clamped",
            "kv",
            f"{requested} bytes were requested and {granted} granted",
            {"requested_bytes": requested, "granted_bytes": granted},
        )


def _wrong_total(claim: KvClaim, per_rank: Sequence[int], facts: Mapping) -> Finding:
    least = min(per_rank)
    if claim.tokens in per_rank:
        rank = per_rank.index(claim.tokens)
        return Finding(
            "kv-not-minimum",
            "kv",
            f"{claim.tokens} tokens are what rank {rank} has room for; rank "
            f"{per_rank.index(least)} has room for {least}",
            facts,
        )
    for name, scale in (("GB for GiB", Fraction(GB, GIB)), ("GiB for GB", Fraction(GIB, GB))):
        if claim.tokens == min(claim._tokens(scale)):
            return Finding(
                "kv-units",
                "kv",
                f"{claim.tokens} tokens follow from the budget only with {name}; {least} are right",
                facts,
            )
    return Finding(
        "kv-tokens",
        "kv",
        f"{claim.tokens} tokens, but budgets {list(claim.budgets_bytes)} less fixed parts "
        f"{list(claim.fixed_bytes)} at {claim.bytes_per_token} bytes a token give {least}",
        facts,
    )


def check_kv_facts(
    kv: Mapping, expected_per_token: int | Fraction | None = None
) -> Iterator[Finding]:
    """A map's KV figures agree with each other: sources, page and bytes per token.

    expected_per_token  recomputed from the formats (`bytes_per_token`), where the caller knows them
    """
    page = kv.get("page_tokens")
    sources = kv.get("sources")
    stated = kv.get("bytes_per_token")
    if not page or sources is None or stated is None:
        missing = [k for k in ("page_tokens", "sources", "bytes_per_token") if not kv.get(k)]
        yield Finding("kv-bytes-per-token", "kv", f"lacks {', '.join(missing)}", {"keys": missing})
        return
    page_bytes = sum(s["entries_per_page"] * s["entry_bytes"] for s in sources)
    for source in sources:
        if source["entries_per_page"] * source["ratio"] != page:
            yield Finding(
                "kv-bytes-per-token",
                f"kv / source of layer {source['layer']}",
                f"{source['entries_per_page']} entries of {source['ratio']} tokens are no page of "
                f"{page} tokens",
                dict(source),
            )
    wanted = Fraction(page_bytes, page)
    for what, value in (("formats", expected_per_token), ("sources", wanted)):
        if value is not None and Fraction(stated) != value:
            yield Finding(
                "kv-bytes-per-token",
                "kv",
                f"{stated} bytes a token are stated, the {what} give {float(value):g}",
                {"stated": float(stated), "expected": float(value), "from": what},
            )
    if kv.get("page_bytes") not in (None, page_bytes):
        yield Finding(
            "kv-bytes-per-token",
            "kv",
            f"a page has {kv['page_bytes']} bytes, its sources sum to {page_bytes}",
            {"page_bytes": kv["page_bytes"], "sum_bytes": page_bytes},
        )
