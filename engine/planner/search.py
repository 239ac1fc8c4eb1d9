"""Offsets at the lower bound: the buffers that chain the layers first, then part by part.

The search fits everything under a limit, and the first limit is the lower bound itself. Every
step is deterministic and the effort is bounded by counting placements, not by a clock, so the
same input has the same layout on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.planner.place import Buffers, orders_of, peak_of, place, place_among
from engine.planner.split import components, separators
from engine.units import round_up

PART_SIZES = (400, 150, 200, 1000)
"""Largest parts that the buffers are cut into, in the order they are tried."""
STEPS_BACK = (4, 2, 16)
"""A buffer that does not fit moves to its position divided by one of these."""
ROUNDS_MAX = 25
"""Placements of a part per order and step."""
RESTARTS_MAX = 8
"""Times that the chaining buffers are placed anew, with one more among them."""
PLACEMENTS_MAX = 3_000_000
"""Single placements per part size before the next is tried."""
SLACKS = (1 / 512, 1 / 128, 1 / 32)
"""Shares above the lower bound that are tried in turn when it cannot be met."""


def place_well(buffers: Buffers, lower_bound: int, step: int = 1) -> list[int]:
    """Offsets with the lowest peak found: at the lower bound, near it, or the best greedy one.

    step  sizes are multiples of it, and so is every limit that is tried
    """
    numbers = range(len(buffers.sizes))
    greedy = [place(buffers, order) for order in orders_of(buffers, numbers)]
    best = min(greedy, key=lambda offsets: peak_of(buffers, offsets))
    for slack in (0, *SLACKS):
        limit = round_up(lower_bound + int(lower_bound * slack), step)
        if limit >= peak_of(buffers, best):
            break
        # Sizes above the number of buffers all mean one part, so one of them is enough.
        for part_max in dict.fromkeys(min(size, len(buffers.sizes) + 4) for size in PART_SIZES):
            if (offsets := _Fit(buffers, limit, part_max).offsets()) is not None:
                return offsets
    return best


class _Fit:
    """One attempt to place all buffers under a limit, with parts of a given size."""

    def __init__(self, buffers: Buffers, limit: int, part_max: int) -> None:
        self.buffers, self.limit = buffers, limit
        chaining = separators(buffers, part_max)
        life = [last - first for first, last in zip(buffers.first, buffers.last, strict=True)]
        self.chain = sorted(chaining, key=lambda n: (-life[n], -buffers.sizes[n], n))
        self.left = PLACEMENTS_MAX
        self.solved: dict[tuple, list[int]] = {}

    def offsets(self) -> list[int] | None:
        """Offsets under the limit, None when the effort is used up."""
        count = len(self.buffers.sizes)
        for _ in range(RESTARTS_MAX):
            offsets = [-1] * count
            if not self._place_chain(offsets):
                return None
            chained = set(self.chain)
            parts = components(self.buffers, [n for n in range(count) if n not in chained])
            stubborn = next((s for p in parts if (s := self._place_part(offsets, p)) >= 0), -1)
            if stubborn < 0:
                return offsets
            if self.left <= 0:
                return None
            self.chain.insert(0, stubborn)
        return None

    def _place_chain(self, offsets: list[int]) -> bool:
        for _ in range(len(self.chain) + 1):
            failed = place_among(self.buffers, offsets, self.chain, self.limit)
            if failed is None:
                return True
            if failed == 0:
                return False
            self.chain.insert(failed // 2, self.chain.pop(failed))
        return False

    def _place_part(self, offsets: list[int], part: Sequence[int]) -> int:
        """Place a part beside the chain; -1, or the buffer that most often did not fit."""
        form = self._form(offsets, part)
        if (known := self.solved.get(form)) is not None:
            for number, offset in zip(part, known, strict=True):
                offsets[number] = offset
            return -1
        stubborn = self._search_part(offsets, part)
        if stubborn < 0:
            self.solved[form] = [offsets[number] for number in part]
        return stubborn

    def _form(self, offsets: Sequence[int], part: Sequence[int]) -> tuple:
        """What decides a part's layout: equal layers have equal forms."""
        at = {number: place for place, number in enumerate(part)}
        first, sizes = self.buffers.first, self.buffers.sizes
        rows = []
        for number in part:
            others = self.buffers.neighbours[number]
            inside = tuple(at[n] for n in others if n in at)
            spans = {(offsets[n], offsets[n] + sizes[n]) for n in others if n not in at}
            rows.append((sizes[number], first[number] - first[part[0]], inside, frozenset(spans)))
        return tuple(rows)

    def _search_part(self, offsets: list[int], part: Sequence[int]) -> int:
        refused: Counter[int] = Counter()
        for static in orders_of(self.buffers, part):
            for divisor in STEPS_BACK:
                order = list(static)
                for _ in range(ROUNDS_MAX):
                    failed = place_among(self.buffers, offsets, order, self.limit)
                    self.left -= len(order) if failed is None else failed + 1
                    if failed is None:
                        return -1
                    refused[order[failed]] += 1
                    if failed == 0 or self.left <= 0:
                        break
                    # Buffers that are hard to place gather at the front.
                    order.insert(failed // divisor, order.pop(failed))
        return max(refused, key=lambda n: (refused[n], self.buffers.sizes[n], -n))
