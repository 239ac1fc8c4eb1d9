"""The reference engine: it makes graphs, memory maps, packages and tokens, and judges none of them."""

__version__ = "0.1.0"
