"""Engram addressing gives the release's primes and multipliers, and hashes as specified."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import parse_config, read_config
from engine.engram import _is_prime, bucket_primes, hash_ngrams, multipliers
from fixtures.checkpoints.mini_configs import engram_bucket_primes, mini_config
from suites.numerics.oracle_layers import engram_hashes

RELEASE = read_config(Path(__file__).parent / "flash-config.json")
MINI = parse_config(mini_config())


def test_primes_of_the_release():
    first, second = bucket_primes(RELEASE)
    assert (first[0], first[-1]) == (16000057, 16000463)
    assert (second[0], second[-1]) == (16000477, 16000889)
    assert (sum(first), sum(second)) == (384006168, 384016682) == RELEASE.engram_num_embeddings
    assert len(first) == len(second) == 24
    both = first + second
    assert list(both) == sorted(set(both))


def test_multipliers_of_the_release():
    assert multipliers(RELEASE, 1) == (
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    )
    assert multipliers(RELEASE, 14) == (
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    )


def test_no_product_of_an_id_and_a_multiplier_overflows():
    for config in (RELEASE, MINI, replace(MINI, engram_compressed_vocab_size=1)):
        most = config.engram_compressed_vocab_size - 1
        for layer in config.engram_layer_ids:
            assert all(most * m < 2**63 and m % 2 == 1 for m in multipliers(config, layer))


@given(st.integers(0, 10**5))
def test_primality_is_decided_as_by_division(n):
    divisible = any(n % k == 0 for k in range(2, int(n**0.5) + 1))
    assert _is_prime(n) == (n > 1 and not divisible)


@pytest.mark.parametrize("n", [2047, 3215031751, 3474749660383, 341550071728321, 2**61 - 3])
def test_numbers_that_fool_few_bases_are_no_primes(n):
    assert not _is_prime(n)


def test_large_primes_are_primes():
    assert all(_is_prime(n) for n in (2**31 - 1, 2**61 - 1, 16000057))


@settings(max_examples=30)
@given(st.integers(2, 200), st.integers(1, 3), st.integers(2, 4), st.integers(1, 3))
def test_primes_follow_the_walk_of_the_specification(first, heads, grams, layers):
    text = {
        "engram_layer_ids": list(range(layers)),
        "engram_vocab_size": first,
        "engram_n_heads": heads,
        "engram_max_ngram_size": grams,
    }
    config = replace(
        MINI,
        engram_layer_ids=tuple(range(layers)),
        engram_vocab_size=first,
        engram_n_heads=heads,
        engram_max_ngram_size=grams,
    )
    assert [list(primes) for primes in bucket_primes(config)] == engram_bucket_primes(text)


def ngrams_of(ids: list[int], pad: int, size: int) -> np.ndarray:
    line = np.asarray([pad] * (size - 1) + ids, np.int64)
    rows = [line[size - 1 - k : len(line) - k] for k in range(size)]
    return np.stack(rows, axis=1)


@pytest.mark.parametrize("layer", [1, 3])
def test_hashes_are_the_oracles(layer):
    ids = np.random.default_rng(1).integers(0, 512, 50).tolist()
    found = hash_ngrams(ngrams_of(ids, 2, 4), MINI, layer)
    expected = engram_hashes(ids, 0, MINI)[:, MINI.engram_layer_ids.index(layer)]
    assert torch.equal(torch.from_numpy(found), expected)


def test_hashes_stay_inside_their_buckets():
    ids = np.random.default_rng(2).integers(0, 512, 400).tolist()
    for layer, primes in zip(MINI.engram_layer_ids, bucket_primes(MINI), strict=True):
        rows = hash_ngrams(ngrams_of(ids, 2, 4), MINI, layer)
        starts = np.cumsum((0, *primes))
        assert (rows >= starts[:-1]).all() and (rows < starts[1:]).all()


def test_a_bucket_sees_only_the_ids_of_its_n_gram():
    ids = np.random.default_rng(3).integers(0, 512, 9).tolist()
    before = hash_ngrams(ngrams_of(ids, 2, 4), MINI, 1)[-1]
    heads = MINI.engram_n_heads
    for back, unchanged in ((1, 0), (2, heads), (3, 2 * heads)):
        other = list(ids)
        other[-1 - back] ^= 1
        after = hash_ngrams(ngrams_of(other, 2, 4), MINI, 1)[-1]
        assert (after[:unchanged] == before[:unchanged]).all()
        assert (after[unchanged:] != before[unchanged:]).all(), f"{back} back"
    assert hash_ngrams(ngrams_of(ids[:1], 2, 4), MINI, 1).shape == (1, 6)
