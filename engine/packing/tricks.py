"""The tricks of the exact search, each with an off switch that never changes what is correct."""

from __future__ import annotations

from typing import NamedTuple

from engine.errors import must_be_one_of
from engine.packing.errors import PackingInputError


class Tricks(NamedTuple):
    """What the search may do to be faster. A named tuple because the compiled search reads it.

    merge_sections   drop sections whose buffers are all in a neighbouring section
    spanning         a buffer that conflicts with all others of its part goes to the bottom
    components       search parts without common buffers one by one; do not blame finished ones
    support          a buffer refused on the floor rises to the least top it can rest on
    section_bound    floor plus remaining sizes of a section must not exceed the capacity
    release_bound    the same for the buffers above each possible offset of a section
    holes            a hole that the buffer refused there would still fit in is a dead end
    chains           what lies on the floor of a niche must reach from wall to wall
    twins            of interchangeable buffers only one is tried
    fewest_options   branch at the section with the fewest buffers to try, not at the leftmost
    learned_weights  prefer sections that failed often
    restarts         start over with a larger allowance when a run takes long
    portfolio        alternate between several orders of trying buffers
    """

    merge_sections: bool = True
    spanning: bool = True
    components: bool = True
    support: bool = True
    section_bound: bool = True
    release_bound: bool = True
    holes: bool = True
    chains: bool = True
    twins: bool = True
    fewest_options: bool = True
    learned_weights: bool = True
    restarts: bool = True
    portfolio: bool = True

    def without(self, *names: str) -> Tricks:
        """The same with these tricks off."""
        for name in names:
            if name not in self._fields:
                raise PackingInputError(must_be_one_of("trick", name, self._fields))
        return self._replace(**dict.fromkeys(names, False))


ALL_TRICKS = Tricks()
