"""CPU ranks that behave like named GPUs: real compute and real numbers, at another pace and with less memory.

    start_device("v100-16g:2,t4-16g:2", rank=3) -> EmulatedDevice: a T4 of 73 MiB that takes 8.4 s for 1 s of compute

[Note: pace]
A rank's compute takes ``stretch`` seconds of wall time for each second of processor time: ``pace`` closes a piece of
compute (a unit's forward, say) and sleeps for the rest of its stretch. Processor time, not wall time, is what gets
stretched: waiting for other ranks costs none, and is not slowed down; a crowded machine makes wall time longer, but not
processor time. The fastest card is stretched too, by 1.25 x max(1, ranks / cores), so that all ranks together leave
the machine some room; others by as much more as they are slower. What a rank waited for a core meanwhile (Linux tells)
is taken off its sleep, and so is what an earlier sleep took too long. Processor time of the memory meter is not the
card's: its cost for an operator is measured at the start, and left out.

[Note: hurry]
A core that has slept takes longer for the same work: its caches are another's, its clock is low. Measured on a machine
of 2 cores: 12% to 30% more processor time, of which sleeps of 5 ms show four fifths and sleeps of 10 ms all. So a
profile made without sleeping promises a card faster than it trains, most of all a slow one, which sleeps most. Where
a profile hurries, it therefore sleeps as often as training does, but no longer than 10 ms, and its clock runs ahead by
what it left out.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
import weakref
from collections.abc import Iterator, Sequence

import torch

from poplar.catalog import Card, find_card, parse_cluster
from poplar.device import Device, check_share, current_device
from poplar.errors import ConfigError
from poplar.host import local_world_size, usable_cores
from poplar.memory_meter import MemoryMeter

MEMORY_SCALE = 0.005
"""Share of a card's memory that its emulation has: about 75 MiB for 16 GiB. With it the default recipe, a thousandth of
today's models, fills a T4 with about a dozen samples at stage 0."""
HEADROOM = 1.25
"""Stretch of the fastest card where every rank has a core."""
_SHORTEST_SLEEP_S = 0.0005
"""Shorter debts wait for the next pace: the system wakes a sleeper up to 0.1 ms late."""
_LONGEST_HURRIED_SLEEP_S = 0.010
"""See [Note: hurry]."""
_MOST_AHEAD_S = 0.1
"""A rank that was held up for long catches up no more than this by sleeping less later."""


class EmulatedDevice(Device):
    """A CPU rank that stands for ``card``.

    Args:
        card: what it stands for.
        rank: whose card it is, for its identity and its messages.
        stretch: wall seconds for a second of processor time, 1 or more.
        memory_scale: share of the card's memory that it has.
        memory_fraction: share of that memory that this rank may use. None: all of it.

    Raises:
        ConfigError: ``stretch`` is below 1, or ``memory_scale`` or ``memory_fraction`` is not above 0 and at most 1.
    """

    is_emulated = True

    def __init__(
        self,
        card: Card,
        rank: int,
        stretch: float,
        memory_scale: float = MEMORY_SCALE,
        memory_fraction: float | None = None,
    ):
        if not stretch >= 1:
            raise ConfigError(f"stretch must be 1 or more, since a CPU rank can only be slowed down; got {stretch!r}")
        self.card = card
        self.stretch = stretch
        self.memory_scale = check_share("memory_scale", memory_scale)
        super().__init__(memory_fraction)
        self.name = card.name
        self.device_id = f"emulated:{card.name}:{rank}"
        self._meter.owner = f"rank {rank} (emulated {card.name})"
        # One thread, so that the thread's own clock sees all compute.
        torch.set_num_threads(1)
        self._meter_cost_s = _measure_meter_cost_s()
        self._queue_clock = _QueueClock()
        self._debt_s = 0.0
        self._longest_sleep_s = math.inf
        self._ahead_s = 0.0
        self.mark()

    def _read_memory_limit(self) -> int:
        return int(self.card.usable_memory_bytes * self.memory_scale * self.memory_fraction)

    def native_dtypes(self) -> tuple[str, ...]:
        names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
        return tuple(names[dtype] for dtype in self.card.native_dtypes)

    def mark(self) -> None:
        self._processor_mark_s = time.thread_time()
        self._queue_mark_s = self._queue_clock.read_s()
        self._operator_mark = self._meter.num_operators

    def pace(self) -> None:
        processor_s = time.thread_time() - self._processor_mark_s
        queue_s = self._queue_clock.read_s() - self._queue_mark_s
        meter_s = (self._meter.num_operators - self._operator_mark) * self._meter_cost_s
        self._debt_s += self.stretch * max(0.0, processor_s - meter_s) - processor_s - queue_s
        if self._debt_s > _SHORTEST_SLEEP_S:
            left_out_s = max(0.0, self._debt_s - self._longest_sleep_s)
            self._ahead_s += left_out_s
            self._debt_s -= left_out_s
            began_s = time.perf_counter()
            time.sleep(self._debt_s)
            self._debt_s -= time.perf_counter() - began_s
        self._debt_s = max(self._debt_s, -_MOST_AHEAD_S)
        self.mark()

    def clock_s(self) -> float:
        return super().clock_s() + self._ahead_s

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        self._longest_sleep_s = _LONGEST_HURRIED_SLEEP_S
        try:
            yield
        finally:
            self._longest_sleep_s = math.inf


def start_device(
    emulate: str | None = None,
    rank: int | None = None,
    memory_fraction: float | None = None,
    memory_scale: float = MEMORY_SCALE,
) -> Device:
    """Return what this rank runs on: the emulated card of its rank, or without ``emulate`` what is really there.

    Args:
        emulate: one card a rank, as "v100-16g:2,t4-16g:2".
        rank: this process's rank. None: as the launcher says.
        memory_fraction: share of its memory that this rank may use. None: all of it.
        memory_scale: share of a card's memory that its emulation has.

    Raises:
        ConfigError: an unknown card, fewer cards than ranks, or a share that is not above 0 and at most 1.
    """
    if emulate is None:
        return current_device(memory_fraction)
    cards = [find_card(name) for name in parse_cluster(emulate)]
    if rank is None:
        rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    if rank >= len(cards):
        raise ConfigError(f"{emulate!r} names {len(cards)} cards, there is none for rank {rank}; name one card a rank")
    return EmulatedDevice(cards[rank], rank, stretches(cards)[rank], memory_scale, memory_fraction)


def stretches(cards: Sequence[Card]) -> list[float]:
    """Return each card's stretch on this machine: see [Note: pace]."""
    num_ranks = local_world_size() if "LOCAL_WORLD_SIZE" in os.environ else len(cards)
    fastest = HEADROOM * max(1.0, num_ranks / usable_cores())
    best_speed = max(card.relative_speed for card in cards)
    return [fastest * best_speed / card.relative_speed for card in cards]


def describe_emulation(emulate: str) -> str:
    """Say what CPU ranks do that stand for the cards of ``emulate``."""
    fastest = min(stretches([find_card(name) for name in parse_cluster(emulate)]))
    return (
        f"CPU ranks stand for {emulate}: real compute, {fastest:.2f} times as slow for the fastest card and slower for "
        f"the others by their relative speed, {MEMORY_SCALE:.1%} of each card's memory"
    )


class _QueueClock:
    """How long this thread has been ready to run and waited for a core; stands still where the system does not tell."""

    def __init__(self) -> None:
        self._file: int | None = None
        if os.path.exists("/proc/thread-self/schedstat"):
            # Opened once: it stays this thread's file, and reading it anew costs a few microseconds.
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)

    def read_s(self) -> float:
        if self._file is None:
            return 0.0
        # Nanoseconds on a core, nanoseconds waiting for one, and the number of turns.
        return int(os.pread(self._file, 128, 0).split()[1]) / 1e9


def _measure_meter_cost_s(num_bursts: int = 5, num_operators: int = 200) -> float:
    """Return the processor seconds that the memory meter adds to an operator."""
    meter, x = MemoryMeter(), torch.zeros(8)

    def burst_s() -> float:
        began_s = time.thread_time()
        for _ in range(num_operators // 2):
            x.add_(1.0)  # passed through
            x.add(1.0)  # counted
        return time.thread_time() - began_s

    plain, metered = [], []
    for _ in range(num_bursts):
        plain.append(burst_s())
        with meter:
            metered.append(burst_s())
    return max(0.0, statistics.median(metered) - statistics.median(plain)) / num_operators
