"""The seed issue's published speed figures, replayed: three starts per arm separate nothing."""

import json

import pytest
from rich.console import Console

from suites.perf import tables
from suites.perf.errors import RecordError
from suites.perf.evidence import SEED_SPEED, published_cells, three_starts
from suites.perf.stats import Outcome, Policy, judge

SPEED = published_cells()[:-1]
KV_TOKENS = published_cells()[-1]
EVIDENCE = json.loads(SEED_SPEED.read_text())


@pytest.mark.parametrize("cell", published_cells(), ids=lambda cell: cell.cell)
def test_three_starts_per_arm_are_inconclusive_and_need_five_pairs(cell):
    verdict = cell.verdict()
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.pairs == 3 and verdict.pairs_more == 2
    assert "needs at least 5" in verdict.reason


@pytest.mark.parametrize("cell", SPEED, ids=lambda cell: cell.cell)
def test_published_mean_and_range_come_back_from_the_starts(cell):
    published = EVIDENCE["cells"][cell.cell]
    row = cell.row()
    for spread, figures in ((row.base, published["base"]), (row.head, published["head"])):
        assert spread.mean == pytest.approx(figures["mean"], abs=0.05)
        assert (spread.low, spread.high) == (figures["low"], figures["high"])


def test_every_speed_difference_lies_within_the_range_of_single_starts():
    rows = [cell.row() for cell in SPEED]
    assert all(row.inside_single_starts for row in rows)
    assert "Every difference lies within the range of single starts." in tables.markdown(rows)
    assert "within the range of single starts" in EVIDENCE["published_statement"]


def test_kv_tokens_differ_by_more_than_single_starts():
    row = KV_TOKENS.row()
    assert not row.inside_single_starts
    assert round(row.change, 3) == EVIDENCE["published_change_kv_tokens"]
    assert "Every difference" not in tables.markdown([*(c.row() for c in SPEED), row])


def test_table_has_the_published_layout():
    text = tables.markdown([SPEED[0].row()])
    assert "| decode_prose_x1 (tok/s) | 45.5 (44.5 to 46.3) | 44.2 (43.7 to 44.8) | -2.9% |" in text
    assert "| inside | inconclusive, pairs missing: about 2 |" in text
    assert "2,764 (2,540 to 2,891)" in tables.markdown([SPEED[4].row()])


def test_terminal_shows_the_same_texts():
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tables.terminal([SPEED[0].row()]))
    shown = console.export_text()
    assert all(text in shown for text in SPEED[0].row().texts)


def test_three_pairs_could_not_have_decided_whatever_they_showed():
    verdict = judge("c", [100.0, 100.1, 99.9], [50.0, 50.1, 49.9], Policy())
    assert not verdict.decided


def test_twelve_pairs_with_this_spread_would_leave_three_percent_open():
    """The published spread, four times over: what the interval would be, not what was shown."""
    cell = SPEED[0]
    verdict = judge(cell.cell, cell.base * 4, cell.head * 4, Policy(), cells=6)
    assert verdict.interval is not None and verdict.change == pytest.approx(-0.029, abs=0.002)


@pytest.mark.parametrize("wrong", [(10.0, 9.0, 10.1), (9.0, 9.5, 10.0), (11.0, 9.0, 10.0)])
def test_figures_that_cannot_be_three_starts_are_refused(wrong):
    with pytest.raises(RecordError, match="not of three starts"):
        three_starts(*wrong)
