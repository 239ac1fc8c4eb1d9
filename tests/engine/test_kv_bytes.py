"""The caches hold the specified bytes and nothing else: decoded, they are the oracle's rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import read_config
from engine.model.layout import KV_POOL, CacheLayout
from engine.rank import RankModel
from engine.recipe import Recipe
from fixtures.local_ranks import LocalRanks
from suites.numerics.oracle import History, Oracle
from suites.numerics.oracle_formats import FP4_MAGNITUDES
from tests.engine.runs import MINI, in_pieces, some_ids

IDS = some_ids(1, 83)
SLOT = 1
PAGES = (9, 3, 60, 4, 31, 12)


@pytest.fixture(scope="module")
def history() -> History:
    seen = History()
    Oracle(MINI).extend(seen, list(IDS))
    return seen


@pytest.fixture(scope="module", params=[1, 3], ids="tp{}".format)
def model(request):
    recipe = Recipe(
        ranks=request.param,
        max_concurrency=3,
        mtp_draft_tokens=5,
        prefill_chunk=64,
        kv_page_tokens=16,
    )
    with LocalRanks(MINI, recipe) as ranks:
        in_pieces(ranks, IDS, [31, 1, 40, 3], slot=SLOT, pages=PAGES)
        yield ranks.models[-1]


def e2m1(codes: np.ndarray) -> np.ndarray:
    """Two values a byte, the even one in the low nibble, as float64."""
    nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:-1], -1)
    size = FP4_MAGNITUDES.numpy()[nibbles & 7]
    return np.where(nibbles >= 8, -size, size)


def decoded(raw: np.ndarray, kind: torch.dtype) -> np.ndarray:
    """Stored bytes of a torch format as float64."""
    return torch.from_numpy(np.ascontiguousarray(raw)).view(kind).double().numpy()


def scaled(values: np.ndarray, scales: np.ndarray, channels: int) -> np.ndarray:
    return values * np.repeat(scales, channels, axis=-1)[..., : values.shape[-1]]


def entries_of(model: RankModel, source: int) -> tuple[np.ndarray, list[tuple[int, slice]]]:
    """The records [entries, bytes] of a KV source and where in the pool they lie."""
    pool = model.persistent[KV_POOL].reshape(model.pages, -1)
    layout, ratio = CacheLayout(model.config, model.recipe), model.config.ratio(source)
    size, per_page = layout.entry_bytes, 16 // ratio
    places = []
    for entry in range(len(IDS) // ratio):
        at = layout.base_bytes(source) + entry % per_page * size
        places.append((PAGES[entry // per_page], slice(at, at + size)))
    return np.stack([pool[page, span] for page, span in places]), places


def latents_and_keys(model: RankModel, source: int) -> tuple[np.ndarray, np.ndarray]:
    records, _ = entries_of(model, source)
    width, key = model.config.head_dim, model.config.index_head_dim
    sizes = (width // 2, width // 16, key // 2, key // 32)
    assert records.shape[1] == sum(sizes)
    latent, latent_scales, keys, key_scales = np.split(records, np.cumsum(sizes)[:-1], axis=1)
    latents = scaled(e2m1(latent), decoded(latent_scales, torch.float8_e4m3fn), 16)
    return latents, scaled(e2m1(keys), decoded(key_scales, torch.float8_e8m0fnu), 32)


@pytest.mark.parametrize("source", [2, 5])
def test_entries_of_the_pool_are_the_oracles_latents_and_keys(model, history, source):
    latents, keys = latents_and_keys(model, source)
    assert latents.tobytes() == history.rows[f"kv_of_source.{source}"].numpy().tobytes()
    assert keys.tobytes() == history.rows[f"keys_of_source.{source}"].numpy().tobytes()


def test_nothing_else_of_the_pool_is_written(model):
    pool = model.persistent[KV_POOL].reshape(model.pages, -1).copy()
    for source in model.config.kv_source_layer_ids:
        for page, span in entries_of(model, source)[1]:
            pool[page, span] = 0
    assert not pool.any()


def ring_rows(model: RankModel, name: str) -> tuple[np.ndarray, list[int]]:
    """The rows of a slot's ring as float64, and the positions they hold."""
    width, size = model.config.head_dim, model.config.sliding_window + 5
    ring = model.persistent[name].reshape(3, size, width + width // 32)
    assert not ring[[0, 2]].any(), "another slot was written"
    positions = list(range(len(IDS) - size, len(IDS)))
    rows = ring[SLOT][[p % size for p in positions]]
    codes = decoded(rows[:, :width], torch.float8_e4m3fn)
    return scaled(codes, decoded(rows[:, width:], torch.float8_e8m0fnu), 32), positions


def test_window_rings_hold_the_newest_rows(model, history):
    for layer in range(model.config.num_hidden_layers):
        rows, positions = ring_rows(model, f"layers.{layer}.ring")
        expected = history.rows[f"layers.{layer}.attn.window"][positions].numpy()
        assert rows.tobytes() == expected.tobytes(), f"layer {layer}"


def test_draft_rings_hold_the_newest_rows(model, history):
    for block in range(model.config.num_nextn_predict_layers):
        rows, positions = ring_rows(model, f"mtp.{block}.ring")
        assert rows.tobytes() == history.rows[f"mtp.{block}.ring"][positions].numpy().tobytes()


def test_an_open_group_is_kept_unpooled(model, history):
    rows, width = 2 + 5, model.config.head_dim
    tail = model.persistent["layers.2.tail"].view(np.float32).reshape(3, rows, 2 * width)
    last = tail[SLOT][(len(IDS) - 1) % rows].astype(np.float64)
    for part, name in enumerate(("kv", "score")):
        expected = history.rows[f"layers.2.attn.compressor.{name}"][-1].numpy()
        assert last[part * width : (part + 1) * width].tobytes() == expected.tobytes()


@pytest.mark.parametrize("offset", [0, 33, 37, 52])
def test_one_wrong_byte_of_an_entry_is_seen(model, history, offset):
    """In a code and in a scale of the latent and of the key."""
    _, places = entries_of(model, 5)
    page, span = places[40]
    pool = model.persistent[KV_POOL].reshape(model.pages, -1)
    pool[page, span.start + offset] ^= 0x07
    latents, keys = latents_and_keys(model, 5)
    pool[page, span.start + offset] ^= 0x07
    wrong = latents if offset < 36 else keys
    name = "kv_of_source.5" if offset < 36 else "keys_of_source.5"
    assert wrong.tobytes() != history.rows[name].numpy().tobytes()


def test_the_release_takes_890_bytes_a_token():
    config = read_config(Path(__file__).parent / "flash-config.json")
    layout = CacheLayout(config, Recipe())
    assert layout.entry_bytes == 512 // 2 + 512 // 16 + 128 // 2 + 128 // 32 == 356
    assert layout.bytes_per_token == 356 * (3 / 2 + 1) == 890
    assert layout.page_bytes == 890 * 128
    # Sources lie one behind the other.
    assert [layout.base_bytes(s) for s in (2, 8, 14, 20)] == [0, 64 * 356, 128 * 356, 192 * 356]


def test_rings_have_room_for_rejected_drafts():
    config = read_config(MINI)
    layout = CacheLayout(config, Recipe(mtp_draft_tokens=5))
    assert layout.ring_rows == 16 + 5
    assert layout.tail_rows(2) == 2 + 5
    assert layout.pages_per_sequence_max == 512 // 128
