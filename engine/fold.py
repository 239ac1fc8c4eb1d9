"""The Engram's smaller id space: ids whose texts differ in case, accents or spaces fold to one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.config import ModelConfig
from engine.errors import CheckpointError

FOLD_NAME = "engram.fold"
TOKENIZER_NAME = "tokenizer.json"
_REPLACEMENT = "\ufffd"
_LONE_SPACE = "\ue000"


def fold_table(config: ModelConfig, directory: Path) -> np.ndarray:
    """Engram id of every token id: int32 [vocabulary] (spec 5).

    The identity where nothing folds, else computed from the checkpoint's `tokenizer.json`. Raises
    CheckpointError if it is missing or does not fold to the configured number of ids.
    """
    if config.engram_compressed_vocab_size == config.vocab_size:
        return np.arange(config.vocab_size, dtype=np.int32)
    path = Path(directory) / TOKENIZER_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing; engram_compressed_vocab_size "
            f"{config.engram_compressed_vocab_size} is below vocab_size {config.vocab_size}, so "
            "the texts of the ids are needed"
        )
    table, distinct = _numbered(config, path)
    if distinct != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"{path}: its ids fold to {distinct}; engram_compressed_vocab_size "
            f"{config.engram_compressed_vocab_size} is expected"
        )
    return table


def _numbered(config: ModelConfig, path: Path) -> tuple[np.ndarray, int]:
    """Keys numbered by first appearance; ids past the tokenizer's last are never in a text."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises plain Exception for every fault of the file.
        raise CheckpointError(f"{path} is no tokenizer: {error}") from error
    normalise = _normaliser()
    numbers: dict[str, int] = {}
    size = min(tokenizer.get_vocab_size(with_added_tokens=True), config.vocab_size)
    table = np.zeros(config.vocab_size, np.int32)
    for token_id in range(size):
        key = _key(tokenizer, normalise, token_id)
        table[token_id] = numbers.setdefault(key, len(numbers))
    table[size:] = table[config.engram_pad_token_id]
    return table, len(numbers)


def _key(tokenizer, normalise, token_id: int) -> str:
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if _REPLACEMENT in text:
        # Part of a character: only its raw form tells it from the others.
        return tokenizer.id_to_token(token_id) or text
    return normalise.normalize_str(text) or text


def _normaliser():
    """NFKC, NFD, accents stripped, lower case, runs of white space to one space, stripped except
    for a lone space."""
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
