"""What a run says about the first tokens of some prompts, and the stored bits it has to equal.

The stored bits come from the independent oracle (`python -m suites.numerics.first_token` writes
them). This file asks and reads; `logprobs.py` compares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path

import numpy as np

from fixtures.prompts.first_token import TextPrompt, text_prompt
from suites.numerics.logprobs import TOP, Entry, Listing, Step, read_completion
from suites.target import Engines, Server
from suites.target_plan import MODELS, mini_export

GOLDENS = Path(str(files("fixtures"))) / "goldens" / "first_token_mini.json"
VERSION = "first-token/1"
MINI_VOCAB = 512
MINI_POSITIONS = 512
LENGTHS = (5, 17, 64, 65, 72, 128, 193, 300, 386, 511)
"""Below, at and above window (16), index_topk (16), chunk (64) and page (128); last chunks of 1, 2
and 8 tokens; the longest prompt that leaves room for one token."""
STEPS = (1, 2, 8)
KINDS = ("prefill", "decode")
BATCH = "batch"
DECODED = (17, 131)
"""Lengths of the prompts of which more than the first token is compared."""
NO_PREFIX_CACHE = {"prefix-cache-memory": 1}
"""Bytes: less than a page holds nothing."""
BATCH_LENGTHS = (65, 72, 17, 131)
"""One slot each of the four that the miniature is exported with."""


@dataclass(frozen=True)
class Variant:
    """One way to export and run the same model.

    cached  whether the prefix cache is on; every prompt is then asked twice
    """

    name: str
    ranks: int = 3
    options: Mapping[str, object] = field(default_factory=dict)
    start: str = "first"
    cached: bool = False

    @property
    def chunk(self) -> int:
        """Tokens of a prefill step."""
        return int(self.options.get("prefill_chunk", 64))


BASE = Variant("tp3-planned", cached=True)
SECOND_START = Variant("tp3-planned-second-start", start="second")
# Every strategy, rank count and chunk occurs; as all are compared with one set of stored bits,
# their combinations need not. The last two stay up for the tests of the package.
VARIANTS = (
    Variant("tp1-pools-chunk-17", 1, {"scratch": "pools", "prefill_chunk": 17}),
    Variant("tp3-none-chunk-512", 3, {"scratch": "none", "prefill_chunk": 512}),
    BASE,
    SECOND_START,
)


@dataclass(frozen=True)
class Said:
    """Raw answers of one run by prompt, and what its metrics counted meanwhile.

    alone    one request at a time; `again` a second time
    among    the prompts of the batch, sent in one request
    steps    engine steps of each prompt alone, and of the batch under the name BATCH
    hit_tokens  tokens from the prefix cache, when asked alone and when asked again
    """

    run: str
    alone: Mapping[str, str]
    again: Mapping[str, str]
    among: str
    steps: Mapping[str, float]
    hit_tokens: Sequence[float]

    def listings(self, which: str = "alone") -> dict[str, Listing]:
        """The answers as listings by prompt."""
        return {
            name: read_completion(raw, self.run, name, steps_of(name))
            for name, raw in getattr(self, which).items()
        }

    def batch(self) -> dict[str, Listing]:
        """The choices of the batch as listings by prompt."""
        document = json.loads(self.among)
        found = {}
        for prompt, choice in zip(batch_prompts(), document["choices"], strict=True):
            raw = json.dumps({"choices": [choice]})
            found[prompt.name] = read_completion(raw, f"{self.run} in a batch", prompt.name, STEPS)
        return found


def prompts() -> list[TextPrompt]:
    """The prompts that every run is asked."""
    lengths = sorted({*LENGTHS, *DECODED, *BATCH_LENGTHS})
    return [text_prompt(length, MINI_VOCAB) for length in lengths]


def batch_prompts() -> list[TextPrompt]:
    """The prompts that are asked together."""
    return [text_prompt(length, MINI_VOCAB) for length in BATCH_LENGTHS]


def steps_of(name: str) -> Sequence[int]:
    """The generated tokens that are compared."""
    decoded = {text_prompt(n, MINI_VOCAB).name for n in (*DECODED, *BATCH_LENGTHS)}
    return STEPS if name in decoded else (1,)


class Counters:
    """What a server's metrics have counted since the last look."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._last = server.metrics()

    def since(self) -> dict[str, float]:
        """Steps of all kinds, and tokens from the prefix cache."""
        now = self._server.metrics()
        more = {name: value - self._last.get(name, 0.0) for name, value in now.items()}
        self._last = now
        steps = sum(more[f'flare_step_seconds_count{{kind="{kind}"}}'] for kind in KINDS)
        return {"steps": steps, "hits": more['flare_prefix_hit_tokens_total{source="memory"}']}


def ask(server: Server, run: str, cached: bool) -> Said:
    """Put all prompts to a server, alone and together."""
    counters = Counters(server)
    alone, seen = {}, {}
    for prompt in prompts():
        alone[prompt.name] = server.complete(prompt.ids, max(steps_of(prompt.name))).decode()
        seen[prompt.name] = counters.since()
    among = server.complete_batch([p.ids for p in batch_prompts()], max(STEPS)).decode()
    steps = {name: found["steps"] for name, found in seen.items()}
    steps[BATCH] = counters.since()["steps"]
    again = {}
    for prompt in prompts() if cached else ():
        again[prompt.name] = server.complete(prompt.ids, max(steps_of(prompt.name))).decode()
    hits = [sum(found["hits"] for found in seen.values()), counters.since()["hits"]]
    return Said(run, alone, again, among, steps, hits)


def said(engines: Engines, variant: Variant) -> Said:
    """What a variant answers, asked once a run of the tests."""

    def make(path: Path) -> None:
        package = engines.package(mini_export(variant.ranks, **variant.options))
        options = {} if variant.cached else NO_PREFIX_CACHE
        with engines.serve(package, options.items(), variant.start) as server:
            path.write_text(json.dumps(asdict(ask(server, variant.name, variant.cached))))

    key = [variant.name, engines.target.name]
    return Said(**json.loads(engines.shared.once("said", key, make).read_text()))


# The stored bits ----------------------------------------------------------------------------------


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """fp32 log-probabilities of a row of logits: float64 inside, one rounding (spec 1)."""
    wide = np.asarray(logits, np.float64)
    shifted = wide - wide.max()
    return (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)


def step_of(number: int, logits: np.ndarray, top: int = TOP) -> Step:
    """What a run says about one step, from its logits: by value, then by id."""
    values = log_softmax(logits)
    order = np.lexsort((np.arange(len(values)), -values))[:top]
    token = int(np.argmax(logits))
    entries = tuple(Entry(int(i), float(values[i]), repr(float(values[i]))) for i in order)
    return Step(number, token, float(values[token]), entries)


def oracle_listing(oracle, prompt: TextPrompt, steps: Sequence[int], top: int = TOP) -> Listing:
    """The same from the independent oracle (an `oracle.Oracle`)."""
    wanted = max(steps)
    if wanted == 1:
        rows = [oracle.prefill(list(prompt.ids))["logits"]]
    else:
        found = oracle.greedy(list(prompt.ids), wanted - 1)
        rows = [oracle.prefill(list(prompt.ids))["logits"], *found["logits"]]
    listed = tuple(step_of(n, rows[n - 1].numpy().astype(np.float32), top) for n in steps)
    return Listing("oracle", prompt.name, listed)


def to_json(listings: Iterable[Listing]) -> dict:
    """Listings as stored: ids with the bits of fp32 values in hexadecimal."""
    return {
        "version": VERSION,
        "model": "mini",
        "from": "suites.numerics.oracle over fixtures/goldens/mini, prompts of "
        "fixtures.prompts.first_token with seed 0",
        "prompts": {
            listing.prompt: [
                {"step": s.number, "token": s.token, "chosen": _hex(s.chosen)}
                | {"top": " ".join(f"{e.token}:{_hex(e.value)}" for e in s.top)}
                for s in listing.steps
            ]
            for listing in listings
        },
    }


def read_goldens(path: Path = GOLDENS) -> dict[str, Listing]:
    """The stored listings by prompt."""
    document = json.loads(path.read_text())
    if document["version"] != VERSION:
        raise ValueError(f"{path}: version {document['version']!r}; accepted: {VERSION}")
    found = {}
    for name, steps in document["prompts"].items():
        read = tuple(
            Step(
                step["step"],
                step["token"],
                _value(step["chosen"]),
                tuple(_entry(pair) for pair in step["top"].split()),
            )
            for step in steps
        )
        found[name] = Listing("stored bits", name, read)
    return found


def _entry(pair: str) -> Entry:
    token, _, digits = pair.partition(":")
    return Entry(int(token), _value(digits), repr(_value(digits)))


def _hex(value: float) -> str:
    return f"{np.float32(value).view(np.uint32):08x}"


def _value(text: str) -> float:
    return float(np.uint32(int(text, 16)).view(np.float32))


def prompt_digest() -> str:
    """SHA-256 over the ids of all prompts: the stored bits are those of these prompts."""
    text = json.dumps([[p.name, p.ids] for p in prompts()])
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    """Write the stored bits anew."""
    from suites.numerics.oracle import Oracle

    oracle = Oracle(MODELS["mini"])
    document = to_json(oracle_listing(oracle, p, steps_of(p.name)) for p in prompts())
    document["prompts_sha256"] = prompt_digest()
    GOLDENS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
