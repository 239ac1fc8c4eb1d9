"""Collectives over torch.distributed: two exchanges of bytes, started and awaited apart.

Sums are not made here: parts are gathered and the executor adds them in rank order, so no sum
depends on which rank answers first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Exchange(Protocol):
    """An exchange on its way."""

    def wait(self) -> None:
        """Return when the receive buffer is complete."""
        ...


class Communicator:
    """The data path between ranks of one process group."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, ranks: int) -> None:
        self.group = group
        self.rank = rank
        self.ranks = ranks

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Exchange:
        """Every rank's `sent` (equal sizes), one after the other in rank order."""
        return dist.all_gather_single(received, sent, group=self.group, async_op=True)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> Exchange:
        """Cut `sent` into pieces for the ranks in order; `received` gets theirs in rank order."""
        return dist.all_to_all_single(
            received,
            sent,
            list(received_sizes),
            list(sent_sizes),
            group=self.group,
            async_op=True,
        )
