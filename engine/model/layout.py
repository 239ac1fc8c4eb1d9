"""The packed forms of caches and activations in bytes, from the formats alone."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import FP4_KV_BLOCK, FP8_BLOCK, ModelConfig
from engine.recipe import Recipe

KV_POOL = "kv_pool"
"""The paged cache: the one state whose size is found at start, so no part of the fixed memory."""


def packed_fp8(width: int) -> int:
    """Bytes of an FP8 row: a code per channel and a scale per 32."""
    return width + -(-width // FP8_BLOCK)


def packed_fp4(width: int) -> int:
    """Bytes of an FP4 record with power-of-two scales: half a byte a channel, a scale per 32."""
    return width // 2 + width // FP8_BLOCK


@dataclass(frozen=True)
class CacheLayout:
    """Where an entry of the compressed cache lies inside its page, and the sizes of the rings."""

    config: ModelConfig
    recipe: Recipe

    @property
    def key_offset_bytes(self) -> int:
        """Where the index key begins inside an entry: behind the latent and its scales."""
        return self.config.head_dim // 2 + self.config.head_dim // FP4_KV_BLOCK

    @property
    def entry_bytes(self) -> int:
        """One entry: latent, its E4M3 scales, index key, its E8M0 scales (spec 3)."""
        return self.key_offset_bytes + packed_fp4(self.config.index_head_dim)

    def entries_per_page(self, source: int) -> int:
        """Entries of one KV source in a page."""
        return self.recipe.kv_page_tokens // self.config.ratio(source)

    def base_bytes(self, source: int) -> int:
        """Where a source's entries begin inside a page."""
        before = [s for s in self.config.kv_source_layer_ids if s < source]
        return sum(self.entries_per_page(s) for s in before) * self.entry_bytes

    @property
    def page_bytes(self) -> int:
        """One page of all sources."""
        sources = self.config.kv_source_layer_ids
        return sum(self.entries_per_page(s) for s in sources) * self.entry_bytes

    @property
    def bytes_per_token(self) -> float:
        """KV bytes of one token on one rank: 890 for the release."""
        return self.page_bytes / self.recipe.kv_page_tokens

    @property
    def pages_per_sequence_max(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.config.max_position_embeddings // self.recipe.kv_page_tokens)

    @property
    def ring_rows(self) -> int:
        """Rows of a window ring: rejected drafts may overwrite as many rows as there are drafts."""
        return self.config.sliding_window + self.recipe.mtp_draft_tokens

    def tail_rows(self, ratio: int) -> int:
        """Rows of the ring that keeps an open group, with room for rejected drafts."""
        return ratio + self.recipe.mtp_draft_tokens
