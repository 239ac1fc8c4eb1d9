"""Cells: what is timed in every start, and which prompts it is timed on."""

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from suites.perf.errors import PerfError


class Kind(StrEnum):
    """How a cell's value comes out of its streams."""

    DECODE = "decode"
    PREFILL = "prefill"
    GAUGE = "gauge"


@dataclass(frozen=True)
class Cell:
    """One figure of a start.

    A cell with `gates=False` is measured and judged but decides nothing: KV tokens at start vary by
    about 5 % with free memory, and the memory suite counts the bytes exactly.
    `margin` overrides the policy's margin (a fraction) for this cell.
    """

    name: str
    kind: Kind
    unit: str
    prompt_class: str = "prose"
    streams: int = 1
    prompt_tokens: int = 0
    new_tokens: int = 0
    samples: int = 3
    windows_max: int = 12
    higher_is_better: bool = True
    gates: bool = True
    margin: float | None = None

    def __post_init__(self) -> None:
        for field in ("streams", "samples", "windows_max"):
            if getattr(self, field) < 1:
                value = getattr(self, field)
                raise PerfError("cell", f"{self.name}: {field} is {value}; 1 or more")
        if self.kind is Kind.DECODE and self.new_tokens < 2:
            raise PerfError(
                "cell", f"{self.name}: {self.new_tokens} new tokens; a decode rate needs 2 or more"
            )

    @property
    def sign(self) -> int:
        """+1 where a larger value is better, -1 where a smaller one is."""
        return 1 if self.higher_is_better else -1


def _decode(prompt_class: str, streams: int) -> Cell:
    return Cell(
        f"decode_{prompt_class}_x{streams}",
        Kind.DECODE,
        "tok/s",
        prompt_class,
        streams,
        prompt_tokens=512,
        new_tokens=512,
    )


def _prefill(name: str, prompt_tokens: int, samples: int) -> Cell:
    # A 120k prompt takes half a minute: a warm-up of six windows is all that a start can afford.
    return Cell(
        name,
        Kind.PREFILL,
        "tok/s",
        prompt_tokens=prompt_tokens,
        new_tokens=1,
        samples=samples,
        windows_max=6,
    )


KV_TOKENS = Cell("kv_tokens", Kind.GAUGE, "tokens", samples=1, gates=False)
SEED_CELLS = (
    _decode("prose", 1),
    _decode("prose", 4),
    _decode("code", 1),
    _decode("code", 4),
    _prefill("prefill_30k", 30_000, 3),
    _prefill("prefill_120k", 120_000, 2),
    KV_TOKENS,
)
MINI_CELLS = (
    Cell("decode_prose_x1", Kind.DECODE, "tok/s", "prose", 1, prompt_tokens=64, new_tokens=32),
    Cell("decode_prose_x4", Kind.DECODE, "tok/s", "prose", 4, prompt_tokens=64, new_tokens=32),
    Cell("prefill_300", Kind.PREFILL, "tok/s", prompt_tokens=300, new_tokens=1),
    KV_TOKENS,
)
CELL_SETS = {"seed": SEED_CELLS, "mini": MINI_CELLS}


def cells_named(name: str) -> tuple[Cell, ...]:
    """The cell set of that name; PerfError lists the sets there are."""
    if name not in CELL_SETS:
        raise PerfError("cells", f"no cell set {name!r}; there are {', '.join(sorted(CELL_SETS))}")
    return CELL_SETS[name]


def prompt_seed(session: str, pair: int, cell: Cell, phase: str, window: int) -> int:
    """Seed of one window's prompts: equal for both arms of a pair, different for everything else.

    `phase` keeps warm-up apart from measurement, since the arms may need different warm-ups. A
    seed that repeats measures the prefix cache instead of the engine (2.3x was seen).
    """
    digest = hashlib.sha256(f"{session}/{pair}/{cell.name}/{phase}/{window}".encode()).digest()
    return int.from_bytes(digest[:6], "big")
