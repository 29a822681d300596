"""Measure one rank at one stage: the largest micro-batch that trains, then seconds and memory by size.

    prepare -> trials by LargestSearch -> repeats until the times agree -> RankProfile

Nothing here waits for another rank.

[Note: slow seconds]
A processor is slower for a second or two, by a third and more: it got warm, or a neighbour uses its caches. Repeats in
a row would all fall into such a time, agree, and bend the curve at one size. So sizes are repeated in rounds, each size
once a round, and slow seconds make all sizes of a round slower, to be left out by the medians.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from poplar.plan import RankProfile
from poplar.profiling.probe import RankProbe
from poplar.profiling.search import LargestSearch
from poplar.profiling.timing import AGREEMENT, sizes_to_time, summarize

BURST_S = 0.1
"""A run on a plain CPU rank lasts about so long."""
_MICRO_STEPS_OF_TRIAL = 2.3
"""A step with accumulation, and an evaluation."""
_MICRO_STEPS_OF_TIMING = 2
_MICRO_STEPS_OF_ONE_SAMPLE = 4
"""Enough to tell what a step takes beyond them."""
_ENOUGH_SAMPLES = 8
"""Up to so many, a size is tried though ``stage_budget_s`` is spent, if its trial alone keeps within it."""
MIN_STEP_TIMINGS = 3
"""Timings that ``optimizer_step_s`` rests on, at least."""
_SHORT_MICRO_STEP_S = 0.06
"""Of shorter ones a few more cost nothing."""
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How far measuring goes."""

    largest_wanted: int
    """No micro-batch above it is tried."""
    memory_margin: float
    """Share of the usable memory that a trial must leave free: training has collectives and fragmentation on top."""
    stage_budget_s: float
    """About how long one stage may take; then no larger micro-batch is tried."""
    point_budget_s: float
    """About how long repeats of one size may take, beyond the first two."""
    undisturbed: bool = False
    """Take the lower quartile of repeats: see timing.py, [Note: the undisturbed quarter]."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A rank's profile, and what is to be said about it."""

    profile: RankProfile
    notes: tuple[str, ...] = ()


def measure_rank(probe: RankProbe, effort: Effort, least_state_bytes: int) -> Measured:
    """Measure; the probe is closed afterwards.

    Args:
        least_state_bytes: model state by arithmetic, for a card where nothing runs.

    Raises:
        whatever the recipe raises, but for running out of memory.
    """
    try:
        return _Measurement(probe, effort).run(least_state_bytes)
    finally:
        probe.close()


class _Measurement:
    """The steps of ``measure_rank``, and what they share."""

    def __init__(self, probe: RankProbe, effort: Effort):
        usable_bytes = probe.usable_bytes
        allowed_bytes = None if usable_bytes is None else int(usable_bytes * (1 - effort.memory_margin))
        self.probe = probe
        self.effort = effort
        self.search = LargestSearch(allowed_bytes, effort.largest_wanted)
        self.notes: list[str] = []
        self._began_s = time.monotonic()
        self._sample_s = 0.0  # real seconds of a micro-step in the last trial, by the sample

    def run(self, least_state_bytes: int) -> Measured:
        if self.probe.prepare():
            self._began_s = time.monotonic()
            while True:
                self._grow()
                unsteady = self._time_in_rounds()
                if unsteady is None:
                    break
                self.search.record(unsteady, None)
        return self._result(least_state_bytes)

    def _grow(self) -> None:
        """Try sizes until the largest is known, or larger ones would take too long."""
        while (size := self.search.next_size()) is not None:
            largest = self.search.largest
            is_roomy = self.search.leaves_half_free(2 * largest)
            if is_roomy:
                size = min(2 * largest, size)
            if largest > 0:
                size = min(
                    size, self._affordable_size(_MICRO_STEPS_OF_TIMING if is_roomy else 2 * _MICRO_STEPS_OF_TRIAL)
                )
                if size <= largest:
                    self.notes.append(
                        f"micro-batches above {largest} were not tried: they would take longer than "
                        f"stage_budget_s={self.effort.stage_budget_s:g}"
                    )
                    return
            if is_roomy:
                self._accept(size)
            else:
                self._try(size)

    def _try(self, size: int) -> None:
        began_s = time.monotonic()
        self.search.record(size, self.probe.trial(size))
        self._sample_s = (time.monotonic() - began_s) / _MICRO_STEPS_OF_TRIAL / size
        if size == 1 == self.search.largest:
            if self._time_once(1):
                # One slow trial is not to end the search at the first sample.
                self._sample_s = min([self._sample_s, *self.probe.runs_s.get(1, [])])
            else:
                self.search.record(1, None)

    def _accept(self, size: int) -> None:
        """Time a size for which memory is no question, instead of trying it; not again what another stage has timed."""
        began_s = time.monotonic()
        if size in self.probe.runs_s:
            self._began_s -= sum(self.probe.runs_s[size])  # counts as spent here, or this stage would go further
            self.search.accept(size)
        elif self._time_once(size):
            self._sample_s = (time.monotonic() - began_s) / self._num_micro_steps(size) / size
            self.search.accept(size)
        else:
            self.search.record(size, None)

    def _affordable_size(self, num_micro_steps: float) -> int:
        """Return the largest size of which so many micro-steps end within ``stage_budget_s``.

        A slow rank, on which the first samples have taken all of it, is not left with a curve of one size.
        """
        budget_s = self.effort.stage_budget_s
        left_s = budget_s - (time.monotonic() - self._began_s)
        anyway = min(_ENOUGH_SAMPLES, int(budget_s / num_micro_steps / self._sample_s))
        return max(anyway, int(left_s / num_micro_steps / self._sample_s))

    def _time_in_rounds(self) -> int | None:
        """Repeat all sizes until their times agree; return a size at which memory ran out, though its trial had fitted.

        See [Note: slow seconds].
        """
        spent_s = dict.fromkeys(sizes_to_time(self.search.largest), 0.0)
        while lacking := [size for size in spent_s if not self._has_enough(size, spent_s[size])]:
            for size in lacking:
                began_s = time.monotonic()
                if not self._time_once(size):
                    return size
                spent_s[size] += time.monotonic() - began_s
        return None

    def _time_once(self, size: int) -> bool:
        """Time a size once more; return False if memory ran out, though the trial had fitted."""
        began_s = time.monotonic()
        while True:
            if not self.probe.time_micro_steps(size, self._num_micro_steps(size)):
                return False
            is_enough = size > 1 or self.probe.num_timings >= MIN_STEP_TIMINGS
            if is_enough or time.monotonic() - began_s > self.effort.point_budget_s:
                return True

    def _num_micro_steps(self, size: int) -> int:
        """Return how many micro-steps to take in a step: see [Note: a processor that comes and goes]."""
        micro_step_s = self._sample_s * size
        fewest = _MICRO_STEPS_OF_ONE_SAMPLE if size == 1 else 2
        if self.probe.is_plain_cpu:
            return max(fewest, math.ceil(BURST_S / micro_step_s))
        return 4 if micro_step_s < _SHORT_MICRO_STEP_S else fewest

    def _has_enough(self, size: int, spent_s: float) -> bool:
        runs_s = self.probe.runs_s.get(size, ())
        if len(runs_s) < 2:
            return False
        return spent_s > self.effort.point_budget_s or summarize(runs_s).is_settled

    def _result(self, least_state_bytes: int) -> Measured:
        probe, largest = self.probe, self.search.largest
        timings = {size: summarize(probe.runs_s[size], self.effort.undisturbed) for size in sizes_to_time(largest)}
        self._note_outcome({size: timing.spread for size, timing in timings.items()})
        return Measured(
            profile=RankProfile(
                device=probe.device.name,
                device_id=probe.device.device_id,
                points=tuple((size, timing.seconds) for size, timing in timings.items()),
                point_spreads=tuple((size, timing.spread) for size, timing in timings.items()),
                max_micro_batch_size=largest,
                optimizer_step_s=probe.optimizer_step_s,
                memory_points=tuple(
                    (size, peak) for size, peak in sorted(self.search.peaks.items()) if size <= largest
                ),
                state_bytes=least_state_bytes if probe.state_bytes is None else probe.state_bytes,
                memory_limit_bytes=probe.usable_bytes,
            ),
            notes=tuple(self.notes),
        )

    def _note_outcome(self, spreads: dict[int, float]) -> None:
        if self.search.largest == 0:
            peak, allowed = self.search.peaks.get(1), self.search.allowed_bytes
            if peak is not None and allowed is not None and peak > allowed:
                why = f"it needs {peak / _MIB:.1f} MiB, {(peak - allowed) / _MIB:.1f} MiB more than may be used"
            else:
                why = self.probe.last_out_of_memory
            self.notes.append(f"not one sample fits: {why}")
        unsteady = {size: spread for size, spread in spreads.items() if spread > AGREEMENT}
        if unsteady:
            self.notes.append(
                f"times at micro-batch sizes {', '.join(map(str, unsteady))} disagree by up to "
                f"{max(unsteady.values()):.0%}; other work on this machine?"
            )
