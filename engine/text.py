"""Between text and token ids: encoding in which special tokens stay text, streamed decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import ConfigError, RequestError

_NO_TOKENIZER = "there is no tokenizer here: give the prompt as a list of token ids"
_REPLACEMENT = "\ufffd"
_UNFINISHED_MAX = 4
"""Tokens that can share one character (UTF-8 has at most four bytes)."""


class Text:
    """A tokenizer file, or none: then only ids are accepted, and id 5 reads `token_id:5`."""

    def __init__(self, path: Path | None = None):
        self._decoder = self._encoder = None
        self._pieces: dict[int, str] = {}
        if path is not None:
            self._decoder, self._encoder = _read(Path(path))

    @property
    def available(self) -> bool:
        """Whether there is a tokenizer."""
        return self._decoder is not None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text; what spells a special token is ordinary text. `add_special_tokens` adds
        what the tokenizer's own post-processor puts around a text. Raises RequestError."""
        if self._encoder is None:
            raise RequestError(_NO_TOKENIZER)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds the lone surrogate {text[error.start]!r} at {error.start}, "
                "which is no character"
            ) from error
        return self._encoder.encode(text, add_special_tokens=add_special_tokens).ids

    def special_id(self, name: str) -> int:
        """The id of a special token. Raises RequestError if there is no tokenizer or no such
        token in it."""
        if self._decoder is None:
            raise RequestError(_NO_TOKENIZER)
        found = self._decoder.token_to_id(name)
        if found is None:
            raise RequestError(f"the tokenizer has no token {name!a}, which the chat format needs")
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        if self._decoder is None:
            return "".join(self.piece(i) for i in ids)
        return self._decoder.decode(list(ids), skip_special_tokens=False)

    def piece(self, token_id: int) -> str:
        """How one token reads on its own; part of a character reads as U+FFFD."""
        if token_id not in self._pieces:
            self._pieces[token_id] = (
                f"token_id:{token_id}" if self._decoder is None else self.decode([token_id])
            )
        return self._pieces[token_id]


def _read(path: Path) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer for decoding, and the one for encoding, which knows no special tokens."""
    try:
        content = path.read_text(encoding="utf-8")
        document = json.loads(content)
        plain = json.dumps({**document, "added_tokens": []})
        return Tokenizer.from_str(content), Tokenizer.from_str(plain)
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {path}: {error.strerror}") from error
    # The tokenizers library raises a plain Exception for a document it does not understand.
    except Exception as error:
        raise ConfigError(f"{path} is not a tokenizer file: {error}") from error


class TextStream:
    """Text of one sequence, token by token; ends at the first of some stop texts.

    A character whose last byte is still to come, and a tail that may become a stop text, are held
    back until they are decided.
    """

    def __init__(self, text: Text, stops: Sequence[str] = ()):
        self._text = text
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._shown = 0
        self._context = 0
        self._held = ""
        self.length = 0

    def push(self, token_id: int) -> tuple[str, bool]:
        """What may be shown after this token, and whether a stop text is complete."""
        self._ids.append(token_id)
        return self._release(self._fresh(final=False), final=False)

    def finish(self) -> str:
        """What was held back; call it once, when the sequence is over without a stop text."""
        return self._release(self._fresh(final=True), final=True)[0]

    def _fresh(self, final: bool) -> str:
        """Newly decided characters. Decoding starts a few tokens back, as a token's text may
        depend on its neighbour (a word's leading space)."""
        if not self._text.available:
            fresh = "".join(self._text.piece(i) for i in self._ids[self._shown :])
            self._shown = len(self._ids)
            return fresh
        whole = self._text.decode(self._ids[self._context :])
        waiting = len(self._ids) - self._shown
        if whole.endswith(_REPLACEMENT) and not final and waiting < _UNFINISHED_MAX:
            return ""
        known = self._text.decode(self._ids[self._context : self._shown])
        self._context, self._shown = self._shown, len(self._ids)
        return whole[len(known) :]

    def _release(self, fresh: str, final: bool) -> tuple[str, bool]:
        pending = self._held + fresh
        places = [p for p in (pending.find(stop) for stop in self._stops) if p >= 0]
        if places:
            pending, held, stopped = pending[: min(places)], "", True
        else:
            cut = len(pending) if final else len(pending) - self._undecided(pending)
            pending, held, stopped = pending[:cut], pending[cut:], False
        self._held = held
        self.length += len(pending)
        return pending, stopped

    def _undecided(self, pending: str) -> int:
        """Length of the longest tail that a stop text begins with."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(pending)), longest, -1):
                if pending.endswith(stop[:size]):
                    longest = size
                    break
        return longest
