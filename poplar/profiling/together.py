"""A few steps of all ranks together: the real engine over the real group, timed from barrier to barrier.

StepTaker.take(profile, choose)     steps of what ``choose`` says; a rank that runs out of memory gets less
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from poplar.config import Batch
from poplar.device import Device, is_out_of_memory
from poplar.engine import Engine
from poplar.errors import ProfileError, StepError
from poplar.plan import ClusterProfile
from poplar.planning.cost import Row
from poplar.profiling.parts import EngineSettings, ProbeBatches, give_back
from poplar.zero.comm import Communicator, from_rank_0, raise_together

_OUT_OF_MEMORY, _BUG = 1.0, 2.0


@dataclass(frozen=True, kw_only=True, eq=False)
class TimedSteps:
    """Steps of one or more kinds, and what they took."""

    kinds: tuple[tuple[Row, ...], ...]
    """By kind of step: the micro-batch sizes of every rank."""
    seconds: NDArray[np.float64]
    """2D, (kinds, rounds)."""
    waited_s: NDArray[np.float64]
    """3D, (ranks, kinds, rounds): what of them each rank's process waited in collectives."""


Choice = tuple[Sequence[Sequence[Row]], int]
"""Kinds of steps, and how many rounds of them."""


@dataclass(frozen=True, kw_only=True)
class StepTaker:
    """Takes steps of all ranks."""

    engines: EngineSettings
    batches: ProbeBatches
    comm: Communicator
    device: Device

    def take(
        self, profile: ClusterProfile, choose: Callable[[ClusterProfile], Choice]
    ) -> tuple[ClusterProfile, TimedSteps | None]:
        """Take the steps that ``choose`` says, at the stage and with the shards of ``profile``.

        Where a rank runs out of memory with what had fitted it alone, it is bounded, and they are chosen anew. Where it
        had no samples, the stage does not fit, and no rank is left any.

        Returns:
            the profile, bounded for such ranks; the steps, None if there were no kinds to take.

        Raises:
            ProfileError: another rank failed, not by running out of memory; the failing rank raises its own error.
        Collective.
        """
        notes: dict[int, str] = {}
        while True:
            kinds, num_rounds = from_rank_0(self.comm, lambda: choose(profile))  # noqa: B023  # called at once
            if not kinds:
                steps = None
                break
            times, failed_ranks = self._time(profile, kinds, num_rounds)
            give_back(self.device)
            if times is not None:
                seconds, waited_s = times[:, 0].max(axis=0), times[:, 1]
                steps = TimedSteps(kinds=tuple(map(tuple, kinds)), seconds=seconds, waited_s=waited_s)
                break
            for rank in failed_ranks:
                profile, notes[rank] = _without_what_failed(profile, rank, _largest(kinds, rank))
        return replace(profile, notes=(*profile.notes, *(notes[rank] for rank in sorted(notes)))), steps

    def _time(
        self, profile: ClusterProfile, kinds: Sequence[Sequence[Row]], num_rounds: int
    ) -> tuple[NDArray[np.float64] | None, tuple[int, ...]]:
        """Return seconds and waiting, 4D (ranks, 2, kinds, rounds), or None and the ranks that ran out of memory."""
        comm, device = self.comm, self.device
        failure: Exception | None = None
        steps: list[list[Batch | None]] = []
        try:
            sizes = {size for rows in kinds for size in rows[comm.rank] if size}
            made = {size: self.batches.make(size) for size in sorted(sizes)}
            steps = [[made.get(size) for size in rows[comm.rank]] for rows in kinds]
        except Exception as error:
            failure = error
        if failed_ranks := _failed_ranks(comm, failure):
            return None, failed_ranks
        seconds: list[float] = []
        try:
            engines = replace(self.engines, shard_ratios=profile.shard_ratios)
            with device.metered() if device.is_emulated else contextlib.nullcontext():
                engine = engines.build(profile.zero_stage, comm, device)
                try:
                    seconds = _take_steps(engine, steps, num_rounds, comm, device)
                finally:
                    engine.close()
        except Exception as error:
            failure = error
        if failed_ranks := _failed_ranks(comm, failure):
            return None, failed_ranks
        # All leave the same barriers, so that the clocks of the ranks differ by very little.
        return np.array(comm.gather_floats(seconds)).reshape(comm.world_size, 2, len(kinds), num_rounds), ()


def _largest(kinds: Sequence[Sequence[Row]], rank: int) -> int:
    return max((size for rows in kinds for size in rows[rank]), default=0)


def _without_what_failed(profile: ClusterProfile, rank: int, failed: int) -> tuple[ClusterProfile, str]:
    """Return the profile after ``rank`` ran out of memory with ``failed`` samples at most, and what to say of it."""
    who = f"rank {rank} ({profile.ranks[rank].device}), stage {profile.zero_stage}"
    if failed == 0:
        for every in range(profile.world_size):
            profile = _bounded(profile, every, 0)
        return profile, (
            f"{who}: ran out of memory in steps of all ranks though it had no samples; its model state and the "
            "collectives' buffers do not fit"
        )
    largest = failed * 9 // 10
    return _bounded(profile, rank, largest), (
        f"{who}: ran out of memory with {failed} samples in steps of all ranks, which had fitted it alone; it gets "
        f"{largest} at most"
    )


def _bounded(profile: ClusterProfile, rank: int, largest: int) -> ClusterProfile:
    """Return the profile with a rank's sizes up to ``largest``."""
    row = profile.ranks[rank]
    bounded = replace(
        row,
        max_micro_batch_size=largest,
        points=tuple(point for point in row.points if point[0] <= largest),
        memory_points=tuple(point for point in row.memory_points if point[0] <= largest),
        point_spreads=tuple(point for point in row.point_spreads if point[0] <= largest),
    )
    return replace(profile, ranks=(*profile.ranks[:rank], bounded, *profile.ranks[rank + 1 :]))


def _failed_ranks(comm: Communicator, failure: Exception | None) -> tuple[int, ...]:
    """Return the ranks that ran out of memory.

    Raises:
        ProfileError: another rank failed in another way; the failing rank raises its own error.
    Collective.
    """
    outcomes = [row[0] for row in comm.gather_floats([_outcome(failure)])]
    if _BUG in outcomes:
        texts = comm.gather_objects(f"{type(failure).__name__}: {failure}")
        if failure is not None and not isinstance(failure, StepError):
            raise failure
        rank = outcomes.index(_BUG)
        raise ProfileError(str(failure or f"rank {rank} failed around the steps of all ranks together: {texts[rank]}"))
    return tuple(rank for rank, outcome in enumerate(outcomes) if outcome == _OUT_OF_MEMORY)


def _outcome(failure: Exception | None) -> float:
    """Tell an out-of-memory here, which is an answer, and the echo of another rank's, from a real failure."""
    if failure is None or isinstance(failure, StepError):
        return 0.0
    return _OUT_OF_MEMORY if is_out_of_memory(failure) else _BUG


def _take_steps(
    engine: Engine, steps: Sequence[Sequence[Batch | None]], num_rounds: int, comm: Communicator, device: Device
) -> list[float]:
    """Return the seconds of steps, then those of them that this rank waited, each flat by kind and round."""
    times = np.zeros((2, len(steps), num_rounds))
    engine.step(steps[0][:1])  # makes connections, the order of the collectives and the optimizer's state
    for number in range(num_rounds):
        for kind, micro_batches in enumerate(steps):
            times[:, kind, number] = _time_step(engine, micro_batches, comm, device)
    return times.ravel().tolist()


def _time_step(
    engine: Engine, micro_batches: Sequence[Batch | None], comm: Communicator, device: Device
) -> tuple[float, float]:
    """Return the seconds of a step, and what of them this rank waited, at the end too. Collective."""
    failure: Exception | None = None
    comm.barrier()
    began_s, waited_s = device.clock_s(), engine.wait_s
    try:
        engine.step(micro_batches)
    except Exception as error:
        failure = error
    stepped_s, waited_s = device.clock_s(), engine.wait_s - waited_s
    # A barrier, too; a later step of the optimizer fails on one rank alone, and the engine would tell in the next step.
    raise_together(comm, failure, "failed in a step of all ranks together")
    ended_s = device.clock_s()
    return ended_s - began_s, waited_s + ended_s - stepped_s
