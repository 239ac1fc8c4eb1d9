"""Lowering: from a configuration, a recipe and a rank's deal to the graphs the rank runs."""

from engine.model.graphs import build_graphs
from engine.model.layout import KV_POOL, CacheLayout

__all__ = ["KV_POOL", "CacheLayout", "build_graphs"]
