"""The reference forward's tensors, bit for bit, at one to four ranks, prefill, decode and drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from engine.recipe import Recipe
from engine.request import DraftStep
from fixtures.local_ranks import LocalRanks

GOLDENS = Path(__file__).parents[2] / "fixtures" / "goldens" / "mini"
LENGTHS = (5, 17, 64, 131, 300)
RANKS = (1, 2, 3, 4)


class Trace:
    """Collects what ops leave behind, per rank."""

    def __init__(self, ranks: int) -> None:
        self.seen: list[dict[str, np.ndarray]] = [{} for _ in range(ranks)]
        self.observers = [self._observer(rank) for rank in range(ranks)]

    def _observer(self, rank: int):
        def note(op, binding) -> None:
            for name in op.outputs:
                if binding.tensor(name).kind != "state":
                    self.seen[rank][name] = binding.array(name).copy()

        return note

    def rows(self, name: str, total: int) -> np.ndarray:
        """A tensor's rows in order: those of all ranks where they are dealt, else rank 0's."""
        first = self.seen[0][name]
        return first if len(first) == total else np.concatenate([s[name] for s in self.seen])


def recipe(ranks: int) -> Recipe:
    return Recipe(ranks=ranks, max_concurrency=4, mtp_draft_tokens=5, prefill_chunk=512)


@pytest.fixture(scope="module", params=RANKS, ids="tp{}".format)
def traced(request):
    trace = Trace(request.param)
    with LocalRanks(GOLDENS, recipe(request.param), observers=trace.observers) as ranks:
        yield ranks, trace


@pytest.fixture(scope="module", params=RANKS, ids="tp{}".format)
def model(request):
    with LocalRanks(GOLDENS, recipe(request.param)) as ranks:
        yield ranks


def golden(name: str) -> dict[str, np.ndarray]:
    with safe_open(GOLDENS / f"{name}.safetensors", "pt") as file:
        return {key: _numpy(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def assert_same_bits(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, not {expected.shape}"
    same = found.tobytes() == np.ascontiguousarray(expected).tobytes()
    if not same:
        wrong = np.argwhere(found != expected)
        at = tuple(wrong[0]) if len(wrong) else "the sign of a zero"
        pytest.fail(f"{what}: {len(wrong)} of {expected.size} differ, the first at {at}")


TENSOR_OF = {
    "attn_out": "layers.{}.attn.out",
    "ffn_out": "layers.{}.ffn.out",
    "engram_out": "layers.{}.engram.h",
    "resid": "layers.{}.h",
}


def found_in_trace(key: str, trace: Trace, ranks: LocalRanks, count: int) -> np.ndarray:
    """What the engine computed for a golden's key."""
    config = ranks.config
    name, _, layer = key.partition(".")
    if name in TENSOR_OF:
        return trace.rows(TENSOR_OF[name].format(layer), count)
    if name == "main_hidden":
        return trace.rows("main_hidden", count)
    if name == "pre_mix":
        return trace.rows(f"layers.{layer}.ffn.mixes", count)[:, : config.hc_mult]
    if name == "engram_hash_ids":
        hashes = [trace.seen[0][f"layers.{i}.engram.hashes"] for i in config.engram_layer_ids]
        return np.stack(hashes, axis=1)
    if name == "topk":
        selected = trace.rows(f"layers.{layer}.attn.indexer.selected", count)
        visible = count // config.ratio(int(layer))
        return selected[:, : min(config.index_topk, visible)]
    assert name == "candidates", f"{key} has no counterpart"
    return candidate_mask(trace.rows("candidates", count), count, config.candidate_block_size)


def candidate_mask(blocks: np.ndarray, count: int, size: int) -> np.ndarray:
    mask = np.zeros((len(blocks), -(-count // size) + 1), bool)
    np.put_along_axis(mask, np.where(blocks >= 0, blocks, mask.shape[1] - 1), True, axis=1)
    return np.repeat(mask[:, :-1], size, axis=1)[:, :count]


@pytest.mark.parametrize("count", LENGTHS)
def test_prefill_gives_every_golden_bit(traced, count):
    ranks, trace = traced
    expected = golden(f"prefill_{count}")
    ids = expected.pop("input_ids").tolist()
    logits = ranks.prefill(ids)
    assert_same_bits(logits, expected.pop("logits_all"), "logits_all")
    assert_same_bits(logits[-1], expected.pop("logits"), "logits")
    assert len(expected) > 30
    for key, value in expected.items():
        assert_same_bits(found_in_trace(key, trace, ranks, count), value, key)


@pytest.mark.parametrize("count", LENGTHS)
def test_decode_and_drafts_give_every_golden_bit(model, count):
    prompt = golden(f"prefill_{count}")["input_ids"].tolist()
    expected = golden(f"decode_{count}")
    tokens = expected["tokens"].tolist()
    ids, logits, drafts = list(prompt), [], []
    assert int(model.prefill(ids, slot=1)[-1].argmax()) == tokens[0]
    for token, following in zip(tokens[:-1], tokens[1:], strict=True):
        logits.append(model.step(model.sequence(ids, len(ids), [token], slot=1))[0][0])
        ids.append(token)
        drafts.append(model.draft(DraftStep(1, len(ids) - 1, following)))
    chosen = np.asarray(tokens[1:], np.int64)[:, None]
    draft_ids = np.concatenate((chosen, np.concatenate([d.ids for d in drafts])), axis=1)
    assert_same_bits(np.stack(logits), expected["logits"], "logits")
    assert_same_bits(draft_ids, expected["draft_ids"], "draft_ids")
    for key, part in (("draft_logits", "logits"), ("confidence", "confidence")):
        found = np.concatenate([getattr(d, part) for d in drafts])
        assert_same_bits(found, expected[key], key)
