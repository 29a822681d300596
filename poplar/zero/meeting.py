"""Meet before rare, long collective work, with a short limit and no collective.

``if rank == 0: engine.save(path)`` would wait in the first collective for the group's timeout (ten minutes), or worse,
be matched with a collective of the next step on the other ranks. So ranks first sign in at the group's store, which
needs no answer from anyone; a rank that misses the others can still tell who they are, and nothing is damaged.

[Note: one verdict]
Whoever brings the number of signatures to world_size opens the meeting; whoever runs out of patience closes it. Both
may happen at once, so the first to take the verdict's number (an atomic add) writes it, and all obey what is written.
Meetings are numbered by each rank for itself. A rank that finds one closed before it came takes the next: those who
waited there have given up and, if they still live, count on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from poplar.errors import CommunicationError
from poplar.zero.comm import Communicator, ProcessGroupComm, check_same
from poplar.zero.debug import CheckedComm

MEETING_TIMEOUT_S = 60.0
"""How far ranks may lie apart when they begin the same work; they come out of the same step."""

_OPEN = "open"
_PATIENCE_S = 10.0  # for a verdict that another rank has taken upon itself to write
_numbers: defaultdict[str, int] = defaultdict(int)  # meetings held so far, by group


def meet(comm: Communicator, what: str, timeout_s: float = MEETING_TIMEOUT_S) -> None:
    """Return once every rank is here.

    Args:
        what: the call that all ranks are in, for messages; the same on every rank.

    Raises:
        CommunicationError: some rank has not come within ``timeout_s``, or came to do something else; raised on every
            rank that came.
    Collective.
    """
    inner = comm.inner if isinstance(comm, CheckedComm) else comm
    if not isinstance(inner, ProcessGroupComm) or inner.world_size == 1:
        return
    group_name = inner.group.group_name
    store = dist.distributed_c10d._get_default_store()
    _numbers[group_name] += 1
    while store.check([_key(group_name, "verdict")]):
        _numbers[group_name] += 1
    verdict = _verdict(store, partial(_key, group_name), inner, timeout_s)
    if verdict != _OPEN:
        raise CommunicationError(
            f"{what}: {verdict} within {timeout_s:.4g} s. Every rank must call it (rank 0 alone writes files), so do "
            "not put it under `if rank == 0:`"
        )
    check_same(comm, what, "what the ranks call together")


def _key(group_name: str, what: str) -> str:
    return f"poplar/meeting/{group_name}/{_numbers[group_name]}/{what}"


def _verdict(store: dist.Store, key: Callable[[str], str], comm: ProcessGroupComm, timeout_s: float) -> str:
    """Sign in, and return what became of the meeting."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    store.set(key(str(comm.rank)), "here")
    if store.add(key("signatures"), 1) == comm.world_size:
        _decide(store, key, _OPEN)
    while not store.check([key("verdict")]):
        late_s = time.monotonic() - deadline
        if late_s > _PATIENCE_S:
            return f"rank {comm.rank} got no answer from the group's store"
        if late_s > 0:
            missing = [rank for rank in range(comm.world_size) if not store.check([key(str(rank))])]
            _decide(store, key, f"rank {comm.rank} was here, but ranks {missing} did not come")
        time.sleep(pause_s)
        pause_s = min(0.1, 1.5 * pause_s)
    verdict = store.get(key("verdict")).decode()
    store.delete_key(key(str(comm.rank)))
    return verdict


def _decide(store: dist.Store, key: Callable[[str], str], verdict: str) -> None:
    if store.add(key("decided"), 1) == 1:
        store.set(key("verdict"), verdict)
