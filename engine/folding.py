"""The Engram fold: token ids onto the smaller id space of their normalised texts (spec 5)."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import numpy as np

from engine.config import ModelConfig
from engine.errors import CheckpointError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SPACES = re.compile(r"\s+")


def normalised(text: str) -> str:
    """NFKC, NFD, no accents, lower case, runs of white space as one space, stripped.

    A text that is one space after all that stays one space.
    """
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if unicodedata.category(c) != "Mn").lower()
    text = _SPACES.sub(" ", text)
    return text if text == " " else text.strip()


def fold_texts(texts: list[str], raw: list[str]) -> np.ndarray:
    """Folded ids int64 [len(texts)], numbered by first appearance.

    A text with a replacement character (part of a character) keeps its raw form from `raw`.
    """
    keys = [("raw", r) if _REPLACEMENT in t else ("text", normalised(t)) for t, r in
            zip(texts, raw, strict=True)]
    numbers: dict[tuple[str, str], int] = {}
    return np.asarray([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def fold_map(config: ModelConfig, tokenizer: Path | None) -> np.ndarray:
    """int64 [vocabulary]: the fold of a tokenizer file, the identity where nothing is folded.

    Raises CheckpointError when the file is missing though ids fold, or gives another number of ids.
    """
    if not config.engram_layer_ids or config.engram_compressed_vocab_size == config.vocab_size:
        return np.arange(config.vocab_size, dtype=np.int64)
    if tokenizer is None or not Path(tokenizer).is_file():
        raise CheckpointError(
            f"engram_compressed_vocab_size is {config.engram_compressed_vocab_size} and vocab_size "
            f"{config.vocab_size}: the fold needs tokenizer.json, which is missing"
        )
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer))
    ids = range(config.vocab_size)
    raw = [loaded.id_to_token(i) or f"<unused {i}>" for i in ids]
    texts = [loaded.decode([i], skip_special_tokens=False) or raw[i] for i in ids]
    fold = fold_texts(texts, raw)
    if (found := int(fold.max()) + 1) != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"{tokenizer} folds {config.vocab_size} ids onto {found}; the configuration says "
            f"{config.engram_compressed_vocab_size}"
        )
    return fold
