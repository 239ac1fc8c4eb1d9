"""Token ids fold onto the ids of their normalised texts, as the release folds its vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from engine.config import parse_config
from engine.errors import CheckpointError
from engine.folding import fold_map, fold_texts, normalised
from fixtures.checkpoints.mini_configs import mini_config

WORDS = ["<s>", "</s>", "<pad>", "cafe", "Cafe", "caf\u00e9", "CAF\u00c9", "tea", " tea"]
FOLDED = [0, 1, 2, 3, 3, 3, 3, 4, 4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Cafe\u0301", "cafe"),
        ("\uff21\ufb01", "afi"),
        (" \t\r\n ", " "),
        ("a \n\n b", "a b"),
        ("  Word ", "word"),
        # A spacing mark is an accent too.
        ("\u0995\u09be", "\u0995"),
        # Letters are lowered one by one: a final sigma is like any other.
        ("\u039f\u03a3", "\u03bf\u03c3"),
        # Runs are of blanks, tabs and line ends; other white space is only stripped.
        ("a\u3000\u2009b\u2028\u2028c\u2028", "a b\u2028\u2028c"),
        ("a\x0bb\x0b", "a\x0bb"),
        # Separators of files are no white space at all.
        ("\x1c", "\x1c"),
    ],
)
def test_text_is_normalised_as_the_release_normalises_it(text, expected):
    assert normalised(text) == expected


def test_ids_are_numbered_by_first_appearance():
    assert fold_texts(["b", "a", "B", "c", "A"], ["x"] * 5).tolist() == [0, 1, 0, 2, 1]


def test_part_of_a_character_keeps_its_raw_form():
    texts = ["\ufffd", "\ufffd", "\ufffd\ufffd", "x"]
    assert fold_texts(texts, ["<A>", "<B>", "<A>", "x"]).tolist() == [0, 1, 0, 2]
    assert fold_texts(["\u0142", "\ufffd"], ["?", "\u0142"]).tolist() == [0, 0]


def test_a_text_of_which_nothing_is_left_keeps_itself():
    assert fold_texts(["\u0301", "\u0300", "\u0301", "\x0b"], [""] * 4).tolist() == [0, 1, 0, 2]


def folding_config(folded: int):
    document = mini_config(vocab_size=len(WORDS), engram_compressed_vocab_size=folded)
    return parse_config(document)


@pytest.fixture
def tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<s>")).save(str(path))
    return path


def test_a_tokenizer_file_folds_the_vocabulary(tokenizer):
    assert fold_map(folding_config(5), tokenizer).tolist() == FOLDED


def test_another_number_of_folded_ids_than_configured_is_refused(tokenizer):
    with pytest.raises(CheckpointError, match="folds 9 ids onto 5; the configuration says 6"):
        fold_map(folding_config(6), tokenizer)


def test_a_missing_tokenizer_is_refused_only_where_ids_fold(tmp_path):
    with pytest.raises(CheckpointError, match="the fold needs tokenizer.json, which is missing"):
        fold_map(folding_config(5), tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="engram_compressed_vocab_size is 5 and vocab_size 9"):
        fold_map(folding_config(5), None)
    assert np.array_equal(fold_map(folding_config(9), None), np.arange(9))


def test_without_engram_layers_nothing_folds():
    config = parse_config(mini_config(engram_layer_ids=[], engram_compressed_vocab_size=5))
    assert np.array_equal(fold_map(config, None), np.arange(512))
