"""Known values through every collective, and the speed of the links: what ``poplar doctor`` asks a cluster.

Cards that cannot copy to each other, or that NCCL drives over a broken path, hang or deliver zeros
(NVIDIA/nccl-tests#117). So every check compares values, and the caller bounds the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from poplar.errors import CommunicationError
from poplar.zero.comm import Communicator, ProcessGroupComm, choose_transport

MAX_PAIRWISE_RANKS = 8
"""With more ranks than this, only neighbours are measured, not all pairs."""
_NUM_ELEMENTS = 1024
_BANDWIDTH_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Check:
    """What one collective did."""

    name: str
    seconds: float
    problem: str = ""
    """Empty: every rank got the right values."""


def check_collectives(comm: Communicator, device: torch.device | str = "cpu") -> list[Check]:
    """Send known values through every collective, with equal, unequal and empty shards.

    Returns:
        the same list on every rank. Collective.
    """
    # A control group that fails would fail here, so it comes first: the others report through it.
    bodies: list[tuple[str, Callable[[], str]]] = [("votes on the host", lambda: _check_votes(comm))]
    for shards, offsets in _offsets(comm.world_size).items():
        for name, body in (("all-gather", _check_all_gather), ("reduce-scatter", _check_reduce_scatter)):
            bodies.append((f"{name}, {shards} shards", _bind(body, comm, device, offsets)))
    bodies.append(("all-reduce", lambda: _check_all_reduce(comm, device)))
    bodies.append(("broadcast", lambda: _check_broadcast(comm, device)))
    return [_run(comm, name, body) for name, body in bodies]


def measure_bandwidth(device: torch.device | str = "cpu") -> dict[tuple[int, int], float]:
    """Return bytes per second between pairs of ranks, by (lower, higher) rank.

    All pairs of up to 8 ranks, else neighbours. The same on every rank. Collective over the default group.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pairs = [(low, high) for high in range(world_size) for low in range(high)]
    if world_size > MAX_PAIRWISE_RANKS:
        pairs = [(low, low + 1) for low in range(world_size - 1)]
    everyone = ProcessGroupComm(device=device)
    own: dict[tuple[int, int], float] = {}
    for pair in pairs:
        # All ranks create every group: torch names groups by counting them.
        group = dist.new_group(list(pair))
        # One pair at a time: two of them would share a link.
        everyone.barrier()
        if rank in pair:
            own[pair] = _pair_bandwidth(choose_transport(group, torch.device(device)).broadcast, device)
    return {pair: speed for row in everyone.gather_objects(own) for pair, speed in row.items()}


def has_code_for(architecture: str, built_for: list[str]) -> bool:
    """Return whether binaries of ``built_for`` run on a card of ``architecture``.

    On NVIDIA machine code ("sm_80") runs on the same major version and an equal or higher minor one; PTX ("compute_90")
    is translated for anything from its version on. Code for a variant ("sm_90a") runs on exactly that version.
    """
    if not architecture.startswith("sm_"):
        return architecture.split(":")[0] in {name.split(":")[0] for name in built_for}
    version = int(architecture.removeprefix("sm_"))
    for name in built_for:
        kind, _, number = name.partition("_")
        if not number.isdigit():
            if number[:-1].isdigit() and int(number[:-1]) == version:
                return True
        elif kind == "compute" and int(number) <= version:
            return True
        elif kind == "sm" and int(number) // 10 == version // 10 and int(number) <= version:
            return True
    return False


def check_vendors(vendors: list[str], backend: str) -> None:
    """Refuse a native library between cards of different makers (ROCm/rccl#1220).

    Args:
        vendors: by rank, "nvidia", "amd" or "cpu".

    Raises:
        CommunicationError: NVIDIA and AMD cards, or cards and CPUs, in one NCCL group.
    """
    first = {vendor: vendors.index(vendor) for vendor in dict.fromkeys(vendors)}
    if backend == "nccl" and len(first) > 1:
        found = ", ".join(f"{vendor} on rank {rank}" for vendor, rank in first.items())
        raise CommunicationError(
            f"backend nccl connects cards of one maker only, this group has {found}; use --backend gloo, which goes "
            "through host memory"
        )


def _offsets(world_size: int) -> dict[str, list[int]]:
    equal = [rank * _NUM_ELEMENTS for rank in range(world_size + 1)]
    # The first rank's shard is empty, the others grow.
    unequal = [rank * (rank - 1) // 2 * _NUM_ELEMENTS for rank in range(1, world_size + 1)]
    return {"equal": equal, "unequal": [0, *unequal]} if world_size > 1 else {"equal": equal}


def _bind(body: Callable[..., str], *args: object) -> Callable[[], str]:
    return lambda: body(*args)


def _run(comm: Communicator, name: str, body: Callable[[], str]) -> Check:
    comm.barrier()
    began_s = time.perf_counter()
    problem = body()
    seconds = time.perf_counter() - began_s
    answers = comm.gather_objects((seconds, problem))
    problems = [f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if answer and answer[1]]
    return Check(name=name, seconds=max(answer[0] for answer in answers if answer), problem="; ".join(problems))


def _pattern(start: int, stop: int, device: torch.device | str) -> Tensor:
    """Return values that differ by place, small whole numbers so that sums are exact."""
    return torch.arange(start, stop, dtype=torch.float32, device=device) % 251 + 1


def _compare(got: Tensor, expected: Tensor) -> str:
    wrong = (got != expected).nonzero()
    if not len(wrong):
        return ""
    place = int(wrong[0])
    return f"expected {float(expected[place]):g} at element {place}, got {float(got[place]):g} ({len(wrong)} wrong)"


def _check_votes(comm: Communicator) -> str:
    expected = [[float(rank), 2.0**-rank] for rank in range(comm.world_size)]
    got = comm.gather_floats(expected[comm.rank])
    return "" if got == expected else f"expected {expected}, got {got}"


def _check_all_gather(comm: Communicator, device: torch.device | str, offsets: list[int]) -> str:
    expected = _pattern(0, offsets[-1], device)
    full = torch.zeros_like(expected)
    own = slice(offsets[comm.rank], offsets[comm.rank + 1])
    full[own] = expected[own]
    comm.all_gather(full, offsets).wait()
    return _compare(full, expected)


def _check_reduce_scatter(comm: Communicator, device: torch.device | str, offsets: list[int]) -> str:
    pattern = _pattern(0, offsets[-1], device)
    own = slice(offsets[comm.rank], offsets[comm.rank + 1])
    full = pattern * (comm.rank + 1)
    comm.reduce_scatter(full, offsets).wait()
    return _compare(full[own], pattern[own] * _sum_of_ranks(comm))


def _check_all_reduce(comm: Communicator, device: torch.device | str) -> str:
    pattern = _pattern(0, _NUM_ELEMENTS, device)
    full = pattern * (comm.rank + 1)
    comm.all_reduce(full).wait()
    return _compare(full, pattern * _sum_of_ranks(comm))


def _check_broadcast(comm: Communicator, device: torch.device | str) -> str:
    for src in range(comm.world_size):
        expected = _pattern(src, src + _NUM_ELEMENTS, device)
        tensor = expected.clone() if comm.rank == src else torch.zeros_like(expected)
        comm.broadcast(tensor, src)
        problem = _compare(tensor, expected)
        if problem:
            return f"from rank {src}: {problem}"
    return ""


def _sum_of_ranks(comm: Communicator) -> int:
    return comm.world_size * (comm.world_size + 1) // 2


def _pair_bandwidth(broadcast: Callable[[Tensor, int], None], device: torch.device | str) -> float:
    """Time round trips, the first one left out; return the bytes per second of the fastest."""
    buffer = torch.zeros(_BANDWIDTH_BYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(4):
        began_s = time.perf_counter()
        broadcast(buffer, 0)
        broadcast(buffer, 1)
        # Reading a value waits for an accelerator: the answer has arrived, so the question had before it.
        buffer[-1].item()
        seconds.append(time.perf_counter() - began_s)
    return 2 * _BANDWIDTH_BYTES / min(seconds[1:])
