"""Rank 0 refuses what no rank may run before it tells the others, and they follow it to the end."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from engine import core as core_module
from engine import mesh as mesh_module
from engine.errors import PeerLostError
from engine.recipe import Recipe
from engine.request import DraftStep
from fixtures.local_ranks import LocalRanks, socket_meshes
from tests.engine.runs import MINI, assert_same_bits, draft_bits, in_pieces, some_ids

IDS = some_ids(1, 30)


def recipe(ranks: int = 1, **more) -> Recipe:
    values = {"max_concurrency": 3, "mtp_draft_tokens": 5, "prefill_chunk": 16}
    return Recipe(ranks=ranks, **{**values, "kv_page_tokens": 16, **more})


@pytest.fixture(scope="module")
def pair():
    with LocalRanks(MINI, recipe(2)) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def single():
    with LocalRanks(MINI, recipe()) as ranks:
        yield ranks


def test_a_core_states_its_limits(pair):
    core = pair.core
    assert (core.slots, core.pages, core.page_tokens) == (3, 64, 16)
    assert core.positions_max == core.vocab_size == 512
    assert core.draft_tokens == 5
    # A decode step may have more rows than a prompt's chunk.
    assert core.tokens_per_step_max == 3 * 6


def test_a_core_without_drafts_says_so_and_refuses_them():
    with LocalRanks(MINI, recipe(mtp_draft_tokens=0)) as ranks:
        assert ranks.core.draft_tokens == 0
        with pytest.raises(AssertionError, match="exported without drafts"):
            ranks.draft(DraftStep(0, 3, 1))


WRONG = {
    "a slot that there is not": ({"slot": 3}, r"slots \[3\] of 3"),
    "a slot below 0": ({"slot": -1}, r"slots \[-1\] of 3"),
    "no ids": ({"ids": ()}, r"positions 0..0"),
    "positions past the last": ({"start": 510, "ids": (1, 2, 3)}, r"positions 510..513"),
    "too few pages": ({"ids": IDS[:16], "pages": ()}, "pages for 0 tokens, 16 are needed"),
    "more pages than a sequence can have": ({"pages": (0,) * 33}, "33 pages of 32"),
    "a page that there is not": ({"pages": (64,)}, r"pages \(64,\) of 64"),
    "a page below 0": ({"pages": (-1,)}, r"pages \(-1,\) of 64"),
    "an id outside the vocabulary": ({"ids": (512,)}, "an id outside the vocabulary"),
    "an id below 0": ({"ids": (-1,)}, "an id outside the vocabulary"),
    "logits of another sequence's row": ({"logit_rows": (4,)}, r"rows \(4,\) of a step"),
    "a history that is too short": ({"start": 9, "history": (1, 2)}, "2 ids of history"),
    "more rows than a prompt may have": ({"ids": IDS[:17], "pages": (0, 1)}, "a step of 17 rows"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_step_that_cannot_be_is_refused_and_harms_nobody(pair, what):
    changes, message = WRONG[what]
    right = pair.sequence((), 0, IDS[:4])
    (before,) = pair.step(right)
    with pytest.raises(AssertionError, match=message):
        pair.step(replace(right, **changes))
    assert_same_bits(pair.step(right)[0], before)


def test_two_sequences_in_one_slot_are_refused(pair):
    one = pair.sequence((), 0, IDS[:4])
    with pytest.raises(AssertionError, match=r"slots \[0, 0\]: one is used twice"):
        pair.step(one, one)
    with pytest.raises(AssertionError, match="0 sequences, 3 slots"):
        pair.step()


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((), r"slots \[\]: none, or one twice"),
        ((DraftStep(1, 3, 0), DraftStep(1, 3, 0)), r"slots \[1, 1\]: none, or one twice"),
        ((DraftStep(3, 3, 0),), r"slots \[3\] of 3"),
        ((DraftStep(0, 3, 512),), "an id outside"),
    ],
)
def test_drafts_that_cannot_be_are_refused(pair, steps, message):
    with pytest.raises(AssertionError, match=message):
        pair.draft(*steps)


def test_a_page_or_window_of_another_size_is_refused_before_anyone_hears(pair):
    page, window = pair.core.export_page(2), pair.core.export_window(1)
    for content in (page[:-1], page + b"\0", page[:1]):
        with pytest.raises(AssertionError, match=f"a page has {len(page)} bytes, not"):
            pair.core.import_page(2, content)
    with pytest.raises(AssertionError, match="page 64 of 64"):
        pair.core.import_page(64, page)
    with pytest.raises(AssertionError, match="window state has"):
        pair.core.import_window(1, window[:-1])
    pair.core.import_page(2, page)
    pair.core.import_window(1, window)
    assert pair.core.export_page(2) == page and pair.core.export_window(1) == window


def test_pages_and_windows_reach_every_rank(pair):
    in_pieces(pair, IDS, [16, 14])
    page, window = pair.core.export_page(0), pair.core.export_window(0)
    pair.core.import_page(9, page)
    pair.core.import_window(2, window)
    in_pieces(pair, IDS[:4], [4])
    for model in pair.models:
        assert model.read_page(9) == page and model.export_window(2) == window


# Which graph runs ---------------------------------------------------------------------------------


@pytest.fixture
def graphs(single, monkeypatch):
    """The graphs that steps run, as they come."""
    seen: list[str] = []
    step = single.models[0].step
    monkeypatch.setattr(
        single.models[0], "step", lambda batch: (seen.append(batch.graph), step(batch))[1]
    )
    return seen


def test_short_steps_decode_and_long_ones_are_prompts(single, graphs):
    for sizes in ((1,), (6,), (7,), (1, 6, 6), (1, 7), (16,)):
        single.step(*(single.sequence((), 0, IDS[:n], slot) for slot, n in enumerate(sizes)))
    assert graphs == ["decode", "decode", "prefill", "decode", "prefill", "prefill"]


def test_a_full_decode_step_may_have_more_rows_than_a_prompt(single, graphs):
    logits = single.step(*(single.sequence((), 0, IDS[:6], slot) for slot in range(3)))
    assert graphs == ["decode"]
    for found in logits[1:]:
        assert_same_bits(found, logits[0])


def test_only_wanted_rows_come_back(single):
    step = single.sequence((), 0, IDS[:9])
    (all_rows,) = single.step(step)
    silent = replace(step, slot=1, ids=IDS[:1], logit_rows=())
    some, none = single.step(replace(step, logit_rows=(2, 8)), silent)
    assert_same_bits(some, all_rows[[2, 8]])
    assert none.shape == (0, 512)


@pytest.mark.parametrize("drafts", [2, 5, 7])
def test_as_many_drafts_come_back_as_were_asked_for(drafts):
    with LocalRanks(MINI, recipe(mtp_draft_tokens=drafts)) as ranks:
        in_pieces(ranks, IDS[:10], [10])
        found = ranks.draft(DraftStep(0, 9, IDS[10]))
    assert found.ids.shape == found.confidence.shape == (1, drafts)
    assert found.logits.shape == (1, drafts, 512)
    assert (found.logits.argmax(-1) == found.ids).all()


def test_fewer_drafts_are_the_first_of_the_block(single):
    in_pieces(single, IDS[:10], [10])
    whole = single.draft(DraftStep(0, 9, IDS[10]))
    with LocalRanks(MINI, recipe(mtp_draft_tokens=2)) as ranks:
        in_pieces(ranks, IDS[:10], [10])
        few = ranks.draft(DraftStep(0, 9, IDS[10]))
    for name in ("ids", "logits", "confidence"):
        assert_same_bits(getattr(few, name), getattr(whole, name)[:, :2], name)


def test_drafts_of_several_sequences_are_those_of_each_alone(single):
    lengths = {2: 4, 0: 29, 1: 17}
    alone = {}
    for slot, count in lengths.items():
        in_pieces(single, IDS[:count], [16], slot=slot)
        alone[slot] = draft_bits(single, IDS, count - 1, slot)
    found = single.draft(*(DraftStep(s, n - 1, IDS[n]) for s, n in lengths.items()))
    for row, slot in enumerate(lengths):
        parts = (found.ids[row], found.logits[row], found.confidence[row])
        assert b"".join(p.tobytes() for p in parts) == alone[slot]


@pytest.mark.parametrize(
    ("changes", "pages"),
    [
        # The decode step has more rows than the chunk: warming up with as many was refused.
        ({"prefill_chunk": 8}, 64),
        ({"prefill_chunk": 1, "max_concurrency": 1, "mtp_draft_tokens": 0}, 64),
        ({"kv_page_tokens": 2}, 1),
        ({"prefill_chunk": 64}, 2),
    ],
)
def test_warming_up_fits_any_recipe(changes, pages):
    with LocalRanks(MINI, recipe(**changes), pages=pages) as ranks:
        ranks.core.warm_up()


# The end ------------------------------------------------------------------------------------------


def test_a_closed_core_runs_nothing_and_may_be_closed_again():
    ranks = LocalRanks(MINI, recipe(2))
    ranks.close()
    ranks.close()
    with pytest.raises(AssertionError, match="the core is closed"):
        ranks.step(ranks.sequence((), 0, IDS[:2]))
    assert not any(thread.is_alive() for thread in ranks._threads)


class Fake:
    """A model that notes what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def __getattr__(self, name: str):
        return lambda *args: self.seen.append((name, *args))


def followed(*messages: bytes) -> tuple[Fake, BaseException | None]:
    """What a follower does with rank 0's messages before rank 0 leaves."""
    lead, other = socket_meshes(2)
    model, errors = Fake(), []

    def run() -> None:
        try:
            core_module.follow(model, other)
        except (AssertionError, PeerLostError) as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    for message in messages:
        lead.broadcast(message)
    lead.close()
    thread.join(10)
    assert not thread.is_alive()
    return model, errors[0] if errors else None


def test_a_follower_does_what_it_is_told_until_the_end():
    model, error = followed(b"\x03\x05\0\0\0page", b"\x02\x01\0\0\0window", b"\x04")
    assert error is None
    assert model.seen == [("write_page", 5, b"page"), ("import_window", 1, b"window"), ("close",)]


def test_a_follower_ends_when_rank_0_is_gone():
    model, error = followed()
    assert isinstance(error, PeerLostError) and "rank 0 is gone" in str(error)
    assert model.seen == [("close",)]


def test_a_message_of_an_unknown_kind_ends_the_follower():
    model, error = followed(b"\x09abc")
    assert str(error) == "a message of unknown kind b'\\t' with 3 bytes"
    assert model.seen == [("close",)]


def test_a_rank_that_dies_is_named_by_rank_0(monkeypatch):
    monkeypatch.setattr(mesh_module, "PATIENCE_S", 0.05)
    ranks = LocalRanks(MINI, recipe(2))

    def die(batch) -> None:
        raise MemoryError("planted")

    ranks.models[1].step = die
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        ranks.step(ranks.sequence((), 0, IDS[:9]))
    with pytest.raises(MemoryError, match="planted"):
        ranks.close()


def test_logits_do_not_change_when_the_next_step_runs(single):
    (first,) = single.step(single.sequence((), 0, IDS[:5]))
    copy = np.array(first)
    single.step(single.sequence((), 0, IDS[5:10], slot=1))
    assert_same_bits(first, copy)
