"""A step becomes arrays that survive the way to the other ranks."""

from __future__ import annotations

import numpy as np
import pytest

from engine.batch import batch_from_bytes, draft_batch, step_batch
from engine.config import parse_config
from engine.request import DraftStep, SequenceStep
from fixtures.checkpoints.mini_configs import mini_config

CONFIG = parse_config(mini_config())
FOLD = (np.arange(512, dtype=np.int64) * 7) % 512
PAD = int(FOLD[2])
STEPS = (
    SequenceStep(3, 0, (10, 11), (), (5,), (1,)),
    SequenceStep(1, 7, (20, 21, 22), (1, 2, 3, 4, 5, 6, 7), (9, 8), (0, 2)),
    SequenceStep(0, 1, (30,), (31,), (2, 4, 6), ()),
)


def batch(steps=STEPS, config=CONFIG):
    return step_batch("prefill", steps, config, FOLD)


def test_rows_of_all_sequences_stand_one_after_the_other():
    made = batch()
    assert (made.rows, made.sequences) == (6, 3)
    assert made.ids.tolist() == [10, 11, 20, 21, 22, 30]
    assert made.positions.tolist() == [0, 1, 7, 8, 9, 1]
    assert made.seq_of.tolist() == [0, 0, 1, 1, 1, 2]
    assert made.first_row.tolist() == [0, 2, 5, 6]
    assert made.start.tolist() == [0, 7, 1]
    assert made.slots.tolist() == [3, 1, 0]
    assert made.pages.tolist() == [[5, 0, 0], [9, 8, 0], [2, 4, 6]]


def test_wanted_rows_count_through_the_whole_step():
    assert batch().logit_rows.tolist() == [1, 2, 4]


def test_n_grams_reach_into_the_history_and_begin_with_the_folded_pad():
    f = FOLD.tolist()
    assert batch().ngrams.tolist() == [
        [f[10], PAD, PAD, PAD],
        [f[11], f[10], PAD, PAD],
        [f[20], f[7], f[6], f[5]],
        [f[21], f[20], f[7], f[6]],
        [f[22], f[21], f[20], f[7]],
        [f[30], f[31], PAD, PAD],
    ]


def test_a_cut_history_serves_as_long_as_it_covers_the_n_grams():
    whole = SequenceStep(0, 7, (9,), (1, 2, 3, 4, 5, 6, 7), (1,), ())
    cut = SequenceStep(0, 7, (9,), (5, 6, 7), (1,), ())
    assert np.array_equal(batch([whole]).ngrams, batch([cut]).ngrams)
    short = SequenceStep(0, 7, (9,), (6, 7), (1,), ())
    with pytest.raises(AssertionError, match="2 ids of history at position 7, 3 are needed"):
        batch([short])


@pytest.mark.parametrize("size", [0, 1, 4])
def test_without_engram_layers_no_history_is_needed(size):
    config = parse_config(mini_config(engram_layer_ids=[], engram_max_ngram_size=size))
    step = SequenceStep(0, 7, (9,), (), (1,), ())
    assert batch([step], config).ngrams.shape == (1, 0)


@pytest.mark.parametrize("made", [batch(), draft_batch([DraftStep(2, 8, 5)], CONFIG, 4)])
def test_a_batch_survives_the_way_to_another_rank(made):
    back = batch_from_bytes(made.to_bytes())
    assert back.graph == made.graph
    for name, values in made.inputs.items():
        found = back.inputs[name]
        assert found.dtype == values.dtype and np.array_equal(found, values), name
        assert found.shape == values.shape
    assert np.array_equal(back.logit_rows, made.logit_rows)


def test_every_array_but_the_wanted_rows_is_an_input():
    assert set(batch().inputs) == {
        *("ids", "positions", "seq_of", "ngrams", "first_row", "start", "slots", "pages"),
    }


def test_draft_rows_follow_the_last_position_with_noise_behind_the_next_id():
    made = draft_batch([DraftStep(2, 8, 50), DraftStep(0, 3, 60)], CONFIG, 3)
    noise = CONFIG.dspark_noise_token_id
    assert made.graph == "draft"
    assert made.ids.tolist() == [50, noise, noise, 60, noise, noise]
    assert made.positions.tolist() == [9, 10, 11, 4, 5, 6]
    assert made.start.tolist() == [9, 4]
    assert made.slots.tolist() == [2, 0]
    assert made.seq_of.tolist() == [0, 0, 0, 1, 1, 1]
    assert made.first_row.tolist() == [0, 3, 6]
    assert made.logit_rows.size == 0
