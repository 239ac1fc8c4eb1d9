"""Published speed figures as input: single starts recovered from mean, low and high of three."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suites.perf.errors import RecordError
from suites.perf.files import read_json
from suites.perf.stats import Policy, Verdict, judge
from suites.perf.tables import Row, row_of_figures

SEED_SPEED = Path(__file__).parents[2] / "fixtures" / "evidence" / "seed_speed.json"


@dataclass(frozen=True)
class PublishedCell:
    """One row of a published table with its single starts, in no known order."""

    cell: str
    unit: str
    base: tuple[float, ...]
    head: tuple[float, ...]

    def verdict(self, policy: Policy = Policy(), cells: int = 1) -> Verdict:  # noqa: B008
        """What the starts can show when taken as pairs."""
        return judge(self.cell, self.base, self.head, policy, cells=cells)

    def row(self, policy: Policy = Policy(), cells: int = 1) -> Row:  # noqa: B008
        return row_of_figures(
            self.cell, self.unit, self.base, self.head, self.verdict(policy, cells)
        )


def three_starts(mean: float, low: float, high: float) -> tuple[float, float, float]:
    """(low, middle, high): of three figures the middle one is 3 * mean - low - high.

    RecordError when the published figures cannot be those of three starts; half a unit of the last
    digit, three times over, is allowed for rounding.
    """
    middle = 3 * mean - low - high
    slack = 0.002 * mean
    if not low - slack <= middle <= high + slack:
        raise RecordError("evidence", f"mean {mean}, {low} to {high} are not of three starts")
    return low, min(max(middle, low), high), high


def published_cells(path: Path = SEED_SPEED) -> tuple[PublishedCell, ...]:
    """The rows of a published speed table, KV tokens last."""
    data: dict[str, Any] = read_json(path)
    cells = [
        PublishedCell(name, row["unit"], three_starts(**row["base"]), three_starts(**row["head"]))
        for name, row in data["cells"].items()
    ]
    kv = data["kv_tokens"]
    return (*cells, PublishedCell("kv_tokens", kv["unit"], tuple(kv["base"]), tuple(kv["head"])))
