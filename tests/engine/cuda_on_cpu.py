"""Stand-ins for torch.cuda's streams and events that record what happens before what."""

from __future__ import annotations

from contextlib import contextmanager

import torch


class FakeStream:
    """Work in order; each piece knows all that must have happened before it."""

    def __init__(self, device=None) -> None:
        self.done: frozenset[int] = frozenset()

    def wait_event(self, event: FakeEvent) -> None:
        self.done |= event.done

    def wait_stream(self, other: FakeStream) -> None:
        self.done |= other.done


class FakeEvent:
    """What a stream had done when it was recorded last."""

    def __init__(self) -> None:
        self.done: frozenset[int] = frozenset()

    def record(self, stream: FakeStream) -> None:
        self.done = stream.done


class FakeCuda:
    """Puts the stand-ins in place; `note` does a piece of work on the current stream."""

    def __init__(self, monkeypatch) -> None:
        self.default = self.current = FakeStream()
        self.notes: list[tuple[str, FakeStream]] = []
        self._before: list[frozenset[int]] = []
        for name, value in {
            "Stream": FakeStream,
            "Event": FakeEvent,
            "default_stream": lambda device: self.default,
            "stream": self._on,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def _on(self, stream: FakeStream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def note(self, name: str) -> None:
        """Work of that name."""
        self._before.append(self.current.done)
        self.current.done |= {len(self.notes)}
        self.notes.append((name, self.current))

    def happens_before(self, first: str, second: str, last: bool = False) -> bool:
        """Whether every `second` (or the last) begins after the latest `first` before it ended."""
        names = [name for name, _ in self.notes]
        seconds = [i for i, name in enumerate(names) if name == second]
        found = []
        for i in seconds[-1:] if last else seconds:
            firsts = [j for j, name in enumerate(names[:i]) if name == first]
            found.append(bool(firsts) and firsts[-1] in self._before[i])
        return all(found)
