"""Seconds of a stage's collectives that compute does not hide: real steps of the real engine, less what compute takes.

[Note: calibration]
How much of a collective hides behind compute depends on the sizes of the messages, the order of the units, the library,
the links and how much else the processor has to do; a model of all that would be a guess. So once the curves are known,
the real engine takes a few steps over the real group, each rank with a micro-batch that takes it about as long as the
others, as a plan would give it. With c the slowest rank's curve at its size, o the slowest optimizer step, T1 a step of
one micro-step and T2 one of two:

    stages 0, 1    step_collective_s = T1 - c - o
    stages 2, 3    micro_step_collective_s = T2 - T1 - c,  step_collective_s = T1 - c - o - micro_step_collective_s

none of them below 0. Votes at both ends of a step, imbalance inside a micro-step and everything else that a step costs
beyond compute are in these numbers, and so in predictions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from poplar.curve import curve_of
from poplar.device import Device, is_out_of_memory
from poplar.engine import Engine
from poplar.errors import ProfileError, StepError
from poplar.plan import RankProfile
from poplar.profiling.parts import EngineSettings, ProbeBatches
from poplar.zero.comm import Communicator

MIN_ROUNDS, MAX_ROUNDS = 2, 7
ROUNDS_S = 1.2
"""About how long the measured steps of a stage may take together."""
LONG_MICRO_STEP_S = 2.0
"""A micro-step need not be longer to show what its collectives cost."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a stage's collectives add to compute."""

    micro_step_collective_s: float = 0.0
    step_collective_s: float = 0.0
    failed_ranks: tuple[int, ...] = ()
    """Ranks that ran out of memory with micro-batches that had fitted them alone; nothing was measured then."""


def balanced_sizes(ranks: Sequence[RankProfile], global_batch_size: int | None) -> list[int]:
    """Return micro-batches by rank that take about as long, as large as memory and the global batch allow."""
    curves = [curve_of(rank) for rank in ranks]
    able = [curve for curve in curves if curve.max_micro_batch_size > 0]
    if not able:
        return [0] * len(ranks)
    times = np.unique(np.concatenate([curve.seconds_array()[1:] for curve in able]))
    longest_s = min(LONG_MICRO_STEP_S, *(curve.seconds(curve.max_micro_batch_size) for curve in able))
    chosen: list[int] = []
    for seconds in times:
        sizes = [curve.largest_within(float(seconds)) for curve in curves]
        if chosen and (seconds > longest_s or (global_batch_size is not None and sum(sizes) > global_batch_size)):
            break
        chosen = sizes
    return chosen


def calibrate(
    settings: EngineSettings,
    batches: ProbeBatches,
    zero_stage: int,
    ranks: Sequence[RankProfile],
    sizes: Sequence[int],
    comm: Communicator,
    device: Device,
) -> Calibration:
    """Take real steps with micro-batches of ``sizes`` by rank; see [Note: calibration].

    Raises:
        ProfileError: another rank failed, not by running out of memory; the failing rank raises its own error.
    Collective.
    """
    compute_s = max(curve_of(rank).seconds(size) for rank, size in zip(ranks, sizes, strict=True))
    optimizer_s = max(rank.optimizer_step_s for rank in ranks)
    counts = (1, 2) if zero_stage >= 2 else (1,)
    expected_s = sum(count * compute_s + optimizer_s for count in counts)
    num_rounds = int(min(MAX_ROUNDS, max(MIN_ROUNDS, ROUNDS_S / max(expected_s, 1e-9))))
    failure: Exception | None = None
    steps_s: list[float] = []
    try:
        with device.metered() if device.is_emulated else contextlib.nullcontext():
            steps_s = _time_steps(settings, batches, zero_stage, sizes[comm.rank], counts, num_rounds, comm, device)
    except Exception as error:
        failure = error
    kinds = [row[0] for row in comm.gather_floats([_kind(failure)])]
    if any(kind == _BUG for kind in kinds):
        assert failure is not None
        raise ProfileError(str(failure)) if isinstance(failure, StepError) else failure
    if any(kinds):
        return Calibration(failed_ranks=tuple(rank for rank, kind in enumerate(kinds) if kind == _OUT_OF_MEMORY))
    # Every rank leaves a barrier at the same time, so that they measured the same; the mean evens out the rest.
    rows = comm.gather_floats(steps_s)
    one_s, *two_s = [sum(column) / len(column) for column in zip(*rows, strict=True)]
    micro_step_s = max(0.0, two_s[0] - one_s - compute_s) if two_s else 0.0
    return Calibration(
        micro_step_collective_s=micro_step_s,
        step_collective_s=max(0.0, one_s - compute_s - optimizer_s - micro_step_s),
    )


_OUT_OF_MEMORY, _BUG = 1.0, 2.0


def _kind(failure: Exception | None) -> float:
    """Tell an out-of-memory here, which is an answer, and the echo of another rank's, from a real failure."""
    if failure is None or isinstance(failure, StepError):
        return 0.0
    return _OUT_OF_MEMORY if is_out_of_memory(failure) else _BUG


def _time_steps(
    settings: EngineSettings,
    batches: ProbeBatches,
    zero_stage: int,
    size: int,
    counts: Sequence[int],
    num_rounds: int,
    comm: Communicator,
    device: Device,
) -> list[float]:
    """Return the median seconds of a step of each number of micro-steps, from barrier to barrier. Collective."""
    engine = settings.build(zero_stage, comm, device)
    try:
        batch = batches.make(size) if size else None
        seconds: list[list[float]] = [[] for _ in counts]
        engine.step([batch])  # makes connections, and the order of the collectives
        for _ in range(num_rounds):
            for place, count in enumerate(counts):
                seconds[place].append(_time_step(engine, [batch] * count, comm, device))
        return [median(column) for column in seconds]
    finally:
        engine.close()


def _time_step(engine: Engine, micro_batches: list[object], comm: Communicator, device: Device) -> float:
    comm.barrier()
    began_s = device.clock_s()
    engine.step(micro_batches)
    comm.barrier()
    return device.clock_s() - began_s
