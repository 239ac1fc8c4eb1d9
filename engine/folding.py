"""The Engram fold: token ids onto the smaller id space of their normalised texts (spec 5)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from engine.config import ModelConfig
from engine.errors import CheckpointError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@lru_cache(maxsize=1)
def _normalisers():
    """The steps before the strip, and the strip.

    Those of the tokenizers library, because Python's differ where it counts: an accent is any
    combining mark, spacing ones included; letters are lowered one by one; only blanks, tabs and
    line ends form runs; file separators are no white space. The release folds to its
    `engram_compressed_vocab_size` in exactly this way.
    """
    from tokenizers import Regex, normalizers

    steps = [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
    ]
    return normalizers.Sequence(steps), normalizers.Strip()


def normalised(text: str) -> str:
    """NFKC, NFD, no accents, lower case, runs of white space as one space, stripped.

    A text that is one space after all that stays one space.
    """
    steps, strip = _normalisers()
    text = steps.normalize_str(text)
    return text if text == " " else strip.normalize_str(text)


def fold_texts(texts: list[str], raw: list[str]) -> np.ndarray:
    """Folded ids int64 [len(texts)], numbered by first appearance.

    A text with a replacement character (part of a character) keeps its raw form from `raw`, and one
    of which nothing is left keeps itself. Raw forms and normalised texts are one name space.
    """
    numbers: dict[str, int] = {}
    folded = []
    for text, form in zip(texts, raw, strict=True):
        key = form if _REPLACEMENT in text else normalised(text) or text
        folded.append(numbers.setdefault(key, len(numbers)))
    return np.asarray(folded, np.int64)


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
