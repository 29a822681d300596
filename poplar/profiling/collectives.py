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

[Note: the rank that waits least]
That difference of large numbers is good where c is, on cards. A processor is a tenth or a third slower for seconds at a
time, which would all be taken for collectives. But there the process itself waits, so that the engine knows how long.
A step lasts as long as any rank's compute and its waiting together, so the rank that computes longest waits least, and
what it waits is what the collectives add: T1 - c of the very same step. Then how slow the steps were altogether,
over what curves and collectives add up to, is how slow the processor was: ``levels``, by which all times are scaled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from poplar.curve import curve_of
from poplar.device import Device, is_out_of_memory
from poplar.engine import Engine
from poplar.errors import ProfileError, StepError
from poplar.plan import RankProfile
from poplar.profiling.parts import EngineSettings, ProbeBatches
from poplar.zero.comm import Communicator, from_rank_0, raise_together

MIN_ROUNDS, MAX_ROUNDS = 3, 7
ROUNDS_S = 1.5
"""About how long the measured steps of a stage may take together."""
LONG_MICRO_STEP_S = 2.0
"""A micro-step need not be longer to show what its collectives cost."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a stage's collectives add to compute."""

    micro_step_collective_s: float = 0.0
    step_collective_s: float = 0.0
    levels: tuple[float, ...] = ()
    """How much longer each step took than its parts add up to; only known on processors."""
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
    num_rounds = from_rank_0(comm, lambda: int(min(MAX_ROUNDS, max(MIN_ROUNDS, ROUNDS_S / max(expected_s, 1e-9)))))
    failure: Exception | None = None
    batch: Any = None
    try:
        batch = batches.make(sizes[comm.rank]) if sizes[comm.rank] else None
    except Exception as error:
        failure = error
    raise_together(comm, failure, "could not make a batch to measure the collectives with")
    seconds: list[float] = []
    try:
        with device.metered() if device.is_emulated else contextlib.nullcontext():
            seconds = _time_steps(settings, batch, zero_stage, counts, num_rounds, comm, device)
    except Exception as error:
        failure = error
    kinds = [row[0] for row in comm.gather_floats([_kind(failure)])]
    if any(kind == _BUG for kind in kinds):
        assert failure is not None
        raise ProfileError(str(failure)) if isinstance(failure, StepError) else failure
    if any(kinds):
        return Calibration(failed_ranks=tuple(rank for rank, kind in enumerate(kinds) if kind == _OUT_OF_MEMORY))
    # By count of micro-steps, rank and round.
    table = np.array(comm.gather_floats(seconds)).reshape(comm.world_size, 2, len(counts), num_rounds)
    steps_s = table[:, 0].max(axis=0)  # all leave the same barriers, so that they differ by very little
    levels: tuple[float, ...] = ()
    if device.torch_device.type == "cpu":
        one_s, *two_s = np.median(table[:, 1].min(axis=0), axis=1).tolist()
        micro_step_s = max(0.0, two_s[0] - one_s) if two_s else 0.0
        parts_s = [count * compute_s + optimizer_s + one_s + (count - 1) * micro_step_s for count in counts]
        levels = tuple((steps_s / np.array(parts_s)[:, None]).ravel().tolist())
    else:
        one_s, *two_s = (np.median(steps_s, axis=1) - compute_s - optimizer_s).tolist()
        micro_step_s = max(0.0, two_s[0] - one_s - compute_s) if two_s else 0.0
    return Calibration(
        micro_step_collective_s=micro_step_s, step_collective_s=max(0.0, one_s - micro_step_s), levels=levels
    )


_OUT_OF_MEMORY, _BUG = 1.0, 2.0


def _kind(failure: Exception | None) -> float:
    """Tell an out-of-memory here, which is an answer, and the echo of another rank's, from a real failure."""
    if failure is None or isinstance(failure, StepError):
        return 0.0
    return _OUT_OF_MEMORY if is_out_of_memory(failure) else _BUG


def _time_steps(
    settings: EngineSettings,
    batch: Any,
    zero_stage: int,
    counts: Sequence[int],
    num_rounds: int,
    comm: Communicator,
    device: Device,
) -> list[float]:
    """Return the seconds of steps, from barrier to barrier, then those of them that this rank waited. Collective.

    Each flat, by number of micro-steps and round.
    """
    engine = settings.build(zero_stage, comm, device)
    try:
        seconds = np.zeros((2, len(counts), num_rounds))
        engine.step([batch])  # makes connections, and the order of the collectives
        for number in range(num_rounds):
            for place, count in enumerate(counts):
                waited_s = engine.wait_s
                seconds[0, place, number] = _time_step(engine, [batch] * count, comm, device)
                seconds[1, place, number] = engine.wait_s - waited_s
        return seconds.ravel().tolist()
    finally:
        engine.close()


def _time_step(engine: Engine, micro_batches: list[object], comm: Communicator, device: Device) -> float:
    comm.barrier()
    began_s = device.clock_s()
    engine.step(micro_batches)
    comm.barrier()
    return device.clock_s() - began_s
