"""Names that differ only in a number between dots, told as one: `layers.*.ffn.out` in 40 layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
Item = TypeVar("Item")


def pattern_of(name: str) -> str:
    """The name with every number between dots as a star."""
    return _NUMBER.sub("*", name)


@dataclass(frozen=True)
class Fold(Generic[Item]):
    """Items that are alike but for a number in their names; `items` in the order given."""

    name: str
    items: tuple[Item, ...]

    @property
    def title(self) -> str:
        """The one name, or the pattern with how many it stands for."""
        return f"{self.name} x{len(self.items)}" if len(self.items) > 1 else self.name


def folded(
    items: Iterable[Item],
    name_of: Callable[[Item], str],
    alike: Callable[[Item], Hashable] = lambda item: None,
) -> list[Fold[Item]]:
    """Items of one pattern that are also `alike`, in the order of the first of each."""
    found: dict[Hashable, list[Item]] = {}
    for item in items:
        found.setdefault((pattern_of(name_of(item)), alike(item)), []).append(item)
    return [
        Fold(pattern if len(held) > 1 else name_of(held[0]), tuple(held))
        for (pattern, _), held in found.items()
    ]
