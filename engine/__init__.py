"""The reference engine: it makes graphs, memory maps, packages and tokens, and judges none."""

__version__ = "0.1.0"
