"""Hybrid sharding: shard inside a group of ranks (a node), replicate over groups.

With R replicas of S ranks each, rank r has shard r mod S of replica r // S:

    replica 0:  rank 0   rank 1        reduce-scatter and all-gather run along a row (fast links),
    replica 1:  rank 2   rank 3        a shard's all-reduce along a column (slow links, 1/S of the bytes)

Source: hybrid sharding in PyTorch FSDP, arXiv:2304.11277, section 3.2.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from poplar.errors import ConfigError
from poplar.zero.comm import ProcessGroupComm, check_fits
from poplar.zero.transport import Done, Transport, Work, choose_transport


class _InOrder:
    """A work that is waited for only when all that were issued before it are complete."""

    def __init__(self, works: deque[_InOrder], work: Work, then: Callable[[], None] | None = None):
        self._works = works
        self._work = work
        self._then = then
        self._is_complete = False
        works.append(self)

    def wait(self) -> None:
        while not self._is_complete:
            oldest = self._works[0]
            oldest._work.wait()
            if oldest._then is not None:
                oldest._then()
            oldest._is_complete = True
            self._works.popleft()


class HybridComm(ProcessGroupComm):
    """Collectives over ``num_replicas`` equal groups of neighbouring ranks; votes over all ranks.

    The two groups move only while they are waited for, so all ranks wait in one order, that of issue: else one rank
    could wait in its row for a rank that waits in its column (shared_memory.py, [Note: nobody waits in a circle]).

    Raises:
        ConfigError: the ranks cannot be divided so.
    Collective.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | str, num_replicas: int):
        super().__init__(group, device)
        if num_replicas < 1 or self.world_size % num_replicas:
            raise ConfigError(f"num_replicas must divide the {self.world_size} ranks; got {num_replicas}")
        self.shard_world_size = self.world_size // num_replicas
        self.replica, self.shard_rank = divmod(self.rank, self.shard_world_size)
        ranks = dist.get_process_group_ranks(self.group)
        row = ranks[self.rank - self.shard_rank :][: self.shard_world_size]
        column = ranks[self.shard_rank :: self.shard_world_size]
        self._row = choose_transport(dist.new_group(row, use_local_synchronization=True), torch.device(device))
        self._column = choose_transport(dist.new_group(column, use_local_synchronization=True), torch.device(device))
        self._works: deque[_InOrder] = deque()

    def _transports(self) -> list[Transport]:
        return [*super()._transports(), self._row, self._column]

    def all_gather(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work:
        check_fits(full, offsets, self.shard_world_size)
        return Done() if self.shard_world_size == 1 else _InOrder(self._works, self._row.all_gather(full, offsets))

    def reduce_scatter(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work:
        check_fits(full, offsets, self.shard_world_size)
        own = full[offsets[self.shard_rank] : offsets[self.shard_rank + 1]]
        along_row: Work = Done() if self.shard_world_size == 1 else self._row.reduce_scatter(full, offsets)

        def along_column() -> None:
            if own.numel():
                self._column.all_reduce(own).wait()

        return _InOrder(self._works, along_row, along_column)
