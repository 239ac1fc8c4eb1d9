"""The chat format: messages become ids, with special tokens only where the format has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from engine.errors import ConfigError, RequestError, must_be_one_of
from engine.text import Text

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class ChatFormat:
    """Names of the special tokens, empty for none; defaults are those of the DeepSeek family.

    A conversation reads: begin, system text, then for each turn user + text, assistant + answer +
    end; the answer to be written follows assistant and think_open (or, thinking off,
    think_close). Earlier answers carry no thoughts and stand behind think_close as well.
    """

    begin: str = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
    end: str = "<\uff5cend\u2581of\u2581sentence\uff5c>"
    user: str = "<\uff5cUser\uff5c>"
    assistant: str = "<\uff5cAssistant\uff5c>"
    think_open: str = "<think>"
    think_close: str = "</think>"
    thinking: bool = False

    def encode(self, messages: Sequence[dict], text: Text, thinking: bool) -> list[int]:
        """Ids of a checked conversation that ends with the place for the answer.

        Raises RequestError if there is no tokenizer, or it lacks one of the special tokens.
        """
        ids = self._marks(text, self.begin)
        for message in messages:
            content = text.encode(message["content"])
            if message["role"] == "system":
                ids += content
            elif message["role"] == "user":
                ids += self._marks(text, self.user) + content
            else:
                ids += self._marks(text, self.assistant, self.think_close) + content
                ids += self._marks(text, self.end)
        return ids + self._marks(
            text, self.assistant, self.think_open if thinking else self.think_close
        )

    def _marks(self, text: Text, *names: str) -> list[int]:
        """Ids of special tokens; an empty name stands for none."""
        return [text.special_id(name) for name in names if name]


def check_messages(messages: Sequence[dict]) -> None:
    """Raise RequestError unless the roles make a conversation that waits for an answer."""
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if message.get("role") not in ROLES:
            raise RequestError(must_be_one_of(f"{where}.role", message.get("role"), ROLES))
    if messages[-1]["role"] == "assistant":
        raise RequestError(
            "the last of messages is the assistant's; a user's or system's is needed"
        )


def read_chat_format(path: Path) -> ChatFormat:
    """A format from a JSON object with some of ChatFormat's fields. Raises ConfigError."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the chat format {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    known = {f.name: f.type for f in fields(ChatFormat)}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds {type(document).__name__}; an object is needed")
    for key, value in document.items():
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}; accepted: {', '.join(known)}")
        if type(value).__name__ != known[key]:
            raise ConfigError(f"{path}: {key} is {value!r}; a {known[key]} is needed")
    return ChatFormat(**document)
