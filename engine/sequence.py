"""One request and one sequence as the scheduler sees them: plain data, and where results go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from engine.sampler import Logprobs, Sampling


@dataclass(frozen=True)
class Token:
    """The `index`-th new token of a sequence; `logprobs` only if the request asks for them."""

    index: int
    id: int
    logprobs: Logprobs | None


class Sink(Protocol):
    """Receives what a sequence produces, called from the scheduler's thread, in order."""

    def prompt(self, position: int, logprobs: Logprobs) -> None:
        """The log-probabilities of the prompt id at `position` (from 1 on)."""
        ...

    def token(self, token: Token) -> bool:
        """A new token; True ends the sequence here (a stop text is complete)."""
        ...

    def end(self, reason: str, cached_tokens: int) -> None:
        """The last call: `stop`, `length`, `cancelled`, or `error: ` and a sentence."""
        ...


@dataclass(frozen=True)
class Request:
    """One sequence to produce.

    ids              the prompt, at least one id
    max_tokens       new tokens at most; 0 runs the prompt only
    stop_ids         ids that end the sequence (they are the last token delivered)
    logprobs         alternatives per new token, None for no log-probabilities
    prompt_logprobs  the same for the prompt's ids; such a request never uses the prefix cache
    counted          False for the server's own probe, which no token counter may show
    """

    ids: tuple[int, ...]
    max_tokens: int
    sink: Sink
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    counted: bool = True


@dataclass(eq=False)
class Sequence:
    """A request on its way: `ids` (prompt and new) of which the first `computed` are in pages.

    `resumed` is where it began when it was admitted, behind what the prefix cache had. It is ready
    to choose a token when one id is left to run. `keys` are the prefix keys of its
    full pages, `stored` of which have been offered to the cache; `borders` are page borders (in
    pages) whose window is kept beside the regular ones.
    """

    request: Request
    arrived_s: float
    ids: list[int] = field(default_factory=list)
    computed: int = 0
    resumed: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    stored: int = 0
    borders: set[int] = field(default_factory=set)
    prompt_reported: int = 0
    cached_tokens: int = 0
    admitted: bool = False
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.ids = list(self.request.ids)

    @property
    def left(self) -> int:
        """Known ids that have not been run."""
        return len(self.ids) - self.computed

    @property
    def prompt_rows_owed(self) -> bool:
        """Whether log-probabilities of prompt ids are asked for and not all delivered yet."""
        wanted = self.request.prompt_logprobs is not None
        return wanted and self.prompt_reported < len(self.request.ids) - 1

    @property
    def produced(self) -> int:
        """New tokens so far."""
        return len(self.ids) - len(self.request.ids)

    @property
    def wanted(self) -> int:
        """New tokens that may still come."""
        return self.request.max_tokens - self.produced
