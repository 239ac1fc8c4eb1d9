"""Engram addressing: primes of the hash buckets, multipliers, and the hash of n-grams (spec 5)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from engine.config import ModelConfig

_INT64_MAX = 2**63 - 1


def _is_prime(n: int) -> bool:
    """Deterministic Miller-Rabin; these bases decide every n below 3.3e24."""
    if n < 2:
        return False
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
    for p in bases:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(base, odd, twos, n) for base in bases)


def _passes(base: int, odd: int, twos: int, n: int) -> bool:
    x = pow(base, odd, n)
    if x in (1, n - 1):
        return True
    for _ in range(twos - 1):
        x = x * x % n
        if x == n - 1:
            return True
    return False


@lru_cache(maxsize=64)
def bucket_primes(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Per Engram layer the rows of each bucket, in (n-gram size, head) order.

    The walk restarts at engram_vocab_size for each n-gram size and never reuses a prime, so the
    primes ascend through all layers.
    """
    layers, candidate = [], config.engram_vocab_size
    for _ in config.engram_layer_ids:
        primes = []
        for _ in range(config.engram_buckets):
            while not _is_prime(candidate):
                candidate += 1
            primes.append(candidate)
            candidate += 1
        layers.append(tuple(primes))
    return tuple(layers)


@lru_cache(maxsize=64)
def multipliers(config: ModelConfig, layer: int) -> tuple[int, ...]:
    """The layer's odd multipliers, one per position of an n-gram."""
    most = max(1, _INT64_MAX // config.engram_compressed_vocab_size // 2)
    rng = np.random.default_rng(10007 * layer)
    drawn = rng.integers(0, most, size=config.engram_max_ngram_size, dtype=np.int64)
    return tuple(int(2 * value + 1) for value in drawn)


def hash_ngrams(ngrams: np.ndarray, config: ModelConfig, layer: int) -> np.ndarray:
    """Table rows of each position: int64 [tokens, buckets] from folded ids [tokens, max n-gram].

    `ngrams[:, k]` is the folded id k positions back. Row numbers count through all buckets.
    """
    index = config.engram_layer_ids.index(layer)
    products = ngrams * np.asarray(multipliers(config, layer), dtype=np.int64)
    rows = np.empty((len(ngrams), config.engram_buckets), dtype=np.int64)
    mixed, column, offset = products[:, 0], 0, 0
    for size in range(2, config.engram_max_ngram_size + 1):
        mixed = mixed ^ products[:, size - 1]
        for _ in range(config.engram_n_heads):
            prime = bucket_primes(config)[index][column]
            rows[:, column] = mixed % prime + offset
            column, offset = column + 1, offset + prime
    return rows
