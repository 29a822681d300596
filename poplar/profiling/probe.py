"""One rank at one stage with nobody at the other end: the real engine, over ``ProbeComm``.

    RankProbe.trial(size)           does a micro-batch of this size train? a step with accumulation, an evaluation
    RankProbe.time_micro_steps(...)  a step of some micro-steps, for their seconds and what the step takes beyond them

[Note: seconds of a micro-step]
The engine calls the loss function once in every micro-step, so the time from one call to the next is one whole
micro-step: forward, backward, and what the stage does with the gradients. The last one ends with the step; what it
takes beyond the others of the same step is the step's own (norm, clipping, optimizer). That is a small difference, so
it is read where micro-steps are shortest, those of one sample, and within one step, which a slow second slows as a
whole. Nothing in the engine needs to know.

[Note: a processor that comes and goes]
A container's CPU quota stops a process for the rest of a period, a busy neighbour for a time slice. A short micro-step
then takes its bare time or several times as much, and a median tells the one or the other. So on a plain CPU rank a run
is the mean over the micro-steps of a step, as many as make it long.

[Note: out of memory]
A caught exception keeps the frames of its traceback alive, and with them the tensors that there was no room for. So the
handler only notes what happened; memory is given back after it has been left. The engine is then built anew: nothing of
the step that failed half way is carried into the next trial.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from statistics import mean, median
from typing import Any, TypeVar

from poplar.config import Batch
from poplar.device import Device, is_out_of_memory
from poplar.engine import Engine
from poplar.profiling.parts import EngineSettings, LossWatch, ProbeBatches, ProbeComm, give_back

T = TypeVar("T")


class RankProbe:
    """One rank's engine at one stage; built when first needed, and anew after it ran out of memory.

    Args:
        settings: what to build.
        batches: shared by the probes of all stages.
        place: rank and world size to be played.
        runs_s: micro-steps that were measured before, at a stage where they are the same work.

    Attributes:
        runs_s: by size, the seconds of every micro-step so far, in order.
        last_out_of_memory: what the last error of this kind said.
        state_bytes: of model state between micro-steps; None until an engine ran.
    """

    def __init__(
        self,
        settings: EngineSettings,
        batches: ProbeBatches,
        zero_stage: int,
        place: tuple[int, int],
        device: Device,
        runs_s: dict[int, list[float]] | None = None,
    ):
        self.zero_stage = zero_stage
        self.device = device
        self.runs_s: dict[int, list[float]] = {} if runs_s is None else runs_s
        self.last_out_of_memory = ""
        self.state_bytes: int | None = None
        self._settings = settings
        self._batches = batches
        self._place = place
        self._engine: Engine | None = None
        self._watch = LossWatch(device)
        self._rests_s: list[float] = []
        self._foreign_bytes = device.allocated_bytes()
        self.is_plain_cpu = device.torch_device.type == "cpu" and not device.is_emulated
        """Metered for its memory alone: training runs without the meter, which costs time."""

    @property
    def usable_bytes(self) -> int | None:
        """What this rank may use, less what was held before the probe. None: unknown."""
        limit = self.device.memory_limit_bytes
        return None if limit is None else limit - self._foreign_bytes

    @property
    def num_timings(self) -> int:
        """Timings that ``optimizer_step_s`` rests on."""
        return len(self._rests_s)

    @property
    def optimizer_step_s(self) -> float:
        """Seconds of a step beyond its micro-steps."""
        return max(0.0, median(self._rests_s)) if self._rests_s else 0.0

    def prepare(self) -> bool:
        """Build the engine and let the optimizer make its state, by a step; return False if memory ran out."""
        with self.device.metered():
            return self._attempt(lambda: self._ready_engine() is not None) is not None

    def trial(self, size: int) -> int | None:
        """Take a step with accumulation, and evaluate; return the peak bytes, None if memory ran out.

        Raises:
            whatever else the recipe raises.
        """

        def run() -> int:
            engine = self._ready_engine()
            self.device.reset_peak()
            batch = self._batches.make(size)
            # It begins with optimizer state, which the engine's first step has made, its second half with gradients.
            self._time_step(engine, batch, size, 2, counts=not self.is_plain_cpu)
            if self._settings.recipe.eval_dataset is not None:
                engine.evaluate([batch])
            return self.device.peak_bytes() - self._foreign_bytes

        with self.device.metered():
            return self._attempt(run)

    def time_micro_steps(self, size: int, number: int) -> bool:
        """Take a step of so many micro-steps for their seconds; return False if memory ran out."""

        def run() -> bool:
            self._time_step(self._ready_engine(), self._batches.make(size), size, number, counts=True)
            return True

        with self._as_in_training():
            return self._attempt(run) is not None

    def close(self) -> None:
        """Give everything back."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        give_back(self.device)

    def _as_in_training(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.is_plain_cpu else self.device.metered()

    def _attempt(self, run: Callable[[], T]) -> T | None:
        """Return what ``run`` returns, None if memory ran out: see [Note: out of memory]."""
        try:
            return run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.last_out_of_memory = str(error).strip().split("\n")[0]
        self.close()
        return None

    def _ready_engine(self) -> Engine:
        if self._engine is None:
            with self.device.metered():
                comm = ProbeComm(*self._place, self.zero_stage, self.device)
                self._engine = self._settings.build(self.zero_stage, comm, self.device, self._watch)
                self._engine.step([self._batches.make(1)])
                self.state_bytes = self._held_bytes(self._engine)
        return self._engine

    def _held_bytes(self, engine: Engine) -> int:
        held = self.device.allocated_bytes() - self._foreign_bytes
        if self.zero_stage >= 2:
            # Between the micro-steps of a step, not between steps, there are the shard's gradients too.
            shards = [param for group in engine.optimizer.param_groups for param in group["params"]]
            held += sum(param.numel() * max(4, param.element_size()) for param in shards)
        return held

    def _time_step(self, engine: Engine, batch: Batch, size: int, number: int, *, counts: bool) -> None:
        """Take a step of ``number`` micro-steps, and note their seconds: see [Note: seconds of a micro-step]."""
        self._watch.calls_s.clear()
        began_s = self.device.clock_s()
        engine.step([batch] * number)
        total_s = self.device.clock_s() - began_s
        if not counts:
            return
        # At stage 3 a new engine runs the loss once more, for the order of its collectives.
        calls_s = self._watch.calls_s[-number:]
        runs_s = [after - before for before, after in zip(calls_s, calls_s[1:], strict=False)]
        usual_s = mean(runs_s) if self.is_plain_cpu else median(runs_s)
        last_s = began_s + total_s - calls_s[-1]
        if size == 1:
            self._rests_s.append(last_s - usual_s)
        if self.is_plain_cpu:
            runs_s = [usual_s]
        elif self._rests_s:
            runs_s.append(last_s - self.optimizer_step_s)
        self.runs_s.setdefault(size, []).extend(seconds for seconds in runs_s if seconds > 0)
