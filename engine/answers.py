"""Answers in OpenAI's shape, whole and streamed, with token ids beside every text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.calls import Call
from engine.engine_loop import End, Piece, PromptRow
from engine.sampler import Logprobs
from engine.text import Text


@dataclass(frozen=True)
class Entry:
    """A token as logprobs objects list it; the first of a prompt has no log-probability."""

    id: int
    offset: int
    logprobs: Logprobs | None


@dataclass
class Choice:
    """One choice while its parts arrive."""

    index: int
    prompt_text: str = ""
    prompt_sent: bool = False
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    prompt_entries: list[Entry] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    end: End | None = None

    def add(self, item: Piece | PromptRow | End) -> None:
        """Take in what the engine sent for this choice."""
        if isinstance(item, PromptRow):
            entry = self.prompt_entries[item.position]
            self.prompt_entries[item.position] = Entry(entry.id, entry.offset, item.logprobs)
            return
        (self.reasoning if item.reasoning else self.text).append(item.text)
        if isinstance(item, End):
            self.end = item
        else:
            offset = len(self.prompt_text) + item.offset
            self.entries.append(Entry(item.token.id, offset, item.token.logprobs))


class Answer:
    """Builds all documents of one call; `identifier` and `created_s` go into each of them."""

    def __init__(self, call: Call, text: Text, model: str, identifier: str, created_s: int):
        self.call, self._text = call, text
        self.choices = [self._choice(index) for index in range(call.choices)]
        kind = "chat.completion" if call.chat else "text_completion"
        self._head = {"id": identifier, "created": created_s, "model": model, "object": kind}
        if call.chat and call.stream:
            self._head["object"] = "chat.completion.chunk"

    def _choice(self, index: int) -> Choice:
        choice = Choice(index)
        if self.call.echo:
            prompt = self.call.prompts[index // self.call.n]
            choice.prompt_text = prompt.text or self._text.decode(prompt.ids)
            offset = 0
            for token_id in prompt.ids:
                choice.prompt_entries.append(Entry(token_id, offset, None))
                offset += len(self._text.piece(token_id))
        return choice

    @property
    def usage(self) -> dict:
        """Token counts; a prompt counts once however many choices it has."""
        prompt = sum(len(p.ids) for p in self.call.prompts)
        completion = sum(len(choice.entries) for choice in self.choices)
        ends = [choice.end for choice in self.choices[:: self.call.n]]
        cached = sum(end.cached_tokens for end in ends if end is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def whole(self) -> dict:
        """The answer to a request that does not stream."""
        choices = [self._whole_choice(choice) for choice in self.choices]
        return {**self._head, "choices": choices, "usage": self.usage}

    def _whole_choice(self, choice: Choice) -> dict:
        text = choice.prompt_text + "".join(choice.text)
        entries = choice.prompt_entries + choice.entries
        if not self.call.chat:
            return self._rendered(choice, {"text": text}, entries)
        message = {"role": "assistant", "content": text}
        if self.call.think_close is not None:
            message["reasoning_content"] = "".join(choice.reasoning)
        return self._rendered(choice, {"message": message}, entries)

    def _rendered(self, choice: Choice, content: dict, entries: Sequence[Entry]) -> dict:
        logprobs = None
        if self.call.logprobs is not None and entries:
            build = chat_logprobs if self.call.chat else completion_logprobs
            logprobs = build(entries, self._text)
        reason = None if choice.end is None else choice.end.reason
        head = {"index": choice.index, "logprobs": logprobs, "finish_reason": reason}
        if self.call.return_token_ids:
            head["token_ids"] = [entry.id for entry in entries]
        return {**head, **content}

    def opening(self) -> list[dict]:
        """What a stream begins with: roles of a chat, echoed prompts of a completion."""
        if self.call.chat:
            return [
                self._chunk(c, {"delta": {"role": "assistant", "content": ""}}, [], False)
                for c in self.choices
            ]
        return []

    def add(self, item: Piece | PromptRow | End) -> Choice:
        """Take in one more item; its choice."""
        choice = self.choices[item.choice]
        choice.add(item)
        return choice

    def chunk(self, item: Piece | PromptRow | End) -> list[dict]:
        """Take in one more item; the documents a stream sends for it.

        The echoed prompt goes out before a choice's first token, when its rows are complete.
        """
        choice, documents = self.add(item), []
        if isinstance(item, PromptRow):
            return documents
        if self.call.echo and not choice.prompt_sent:
            choice.prompt_sent = True
            content = {"text": choice.prompt_text}
            documents.append(self._chunk(choice, content, choice.prompt_entries, last=False))
        entries = choice.entries[-1:] if isinstance(item, Piece) else []
        if not self.call.chat:
            content = {"text": item.text}
        elif item.reasoning:
            content = {"delta": {"reasoning_content": item.text}}
        else:
            content = {"delta": {"content": item.text}}
        last = isinstance(item, End)
        return [*documents, self._chunk(choice, content, entries, last)]

    def _chunk(self, choice: Choice, content: dict, entries: Sequence[Entry], last: bool) -> dict:
        rendered = self._rendered(choice, content, entries)
        if not last:
            rendered["finish_reason"] = None
        document = {**self._head, "choices": [rendered]}
        if self.call.usage_in_chunks:
            document["usage"] = self.usage
        elif self.call.include_usage:
            document["usage"] = None
        return document

    def closing(self) -> list[dict]:
        """What a stream ends with: the usage, if it is wanted."""
        if not self.call.include_usage:
            return []
        return [{**self._head, "choices": [], "usage": self.usage}]


def completion_logprobs(entries: Sequence[Entry], text: Text) -> dict:
    """OpenAI's parallel lists, with `token_ids` and `top_token_ids` (in the order of the top)."""
    found = [entry.logprobs for entry in entries]
    return {
        "tokens": [text.piece(entry.id) for entry in entries],
        "token_ids": [entry.id for entry in entries],
        "token_logprobs": [None if f is None else f.chosen for f in found],
        "top_logprobs": [None if f is None else _by_text(f, text) for f in found],
        "top_token_ids": [None if f is None else list(f.top_ids) for f in found],
        "text_offset": [entry.offset for entry in entries],
    }


def _by_text(logprobs: Logprobs, text: Text) -> dict[str, float]:
    """Best tokens by text, best first; an id whose text is taken goes by its number."""
    found: dict[str, float] = {}
    for token_id, value in zip(logprobs.top_ids, logprobs.top, strict=True):
        piece = text.piece(token_id)
        found[f"token_id:{token_id}" if piece in found else piece] = value
    return found


def chat_logprobs(entries: Sequence[Entry], text: Text) -> dict:
    """OpenAI's list of objects, each with its `token_id`, and the ids as lists as well."""
    content = []
    for entry in entries:
        top = zip(entry.logprobs.top_ids, entry.logprobs.top, strict=True)
        item = _chat_token(entry.id, entry.logprobs.chosen, text)
        content.append({**item, "top_logprobs": [_chat_token(i, v, text) for i, v in top]})
    return {
        "content": content,
        "refusal": None,
        "token_ids": [entry.id for entry in entries],
        "top_token_ids": [list(entry.logprobs.top_ids) for entry in entries],
    }


def _chat_token(token_id: int, value: float, text: Text) -> dict:
    piece = text.piece(token_id)
    # A token that is part of a character has no text of its own, so its bytes are not known.
    spelled = None if "\ufffd" in piece else list(piece.encode())
    return {"token": piece, "logprob": value, "bytes": spelled, "token_id": token_id}
