"""The loop of ``fit``: steps, schedule, held-out losses, and the measurements of both splits.

[Note: steps of the equal split]
What the plan gains is measured, not predicted: some steps in the middle of the run are cut as the equal split would cut
them. A step has the same samples and the same result either way, so they train the model like all others, only slower.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator

from poplar.config import Batch, Recipe
from poplar.engine import Engine, StepResult
from poplar.fit_config import FitConfig
from poplar.loader import PlannedLoader, eval_batches
from poplar.plan import Plan
from poplar.progress import Progress, RunFiles


class Clock:
    """Seconds of steps, and what of them was waiting, from the end of one step to the end of the next.

    So a collective that one step leaves to the next is counted: a clock around each step alone would miss it.
    """

    def __init__(self) -> None:
        self._laps: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        self._last: tuple[float, float] | None = None

    def restart(self) -> None:
        """Leave the next step out: it begins with something else, or is the first of its kind."""
        self._last = None

    def lap(self, waited_s: float, *, by_plan: bool, counts: bool) -> float:
        """End a step; return its seconds, NaN for one left out. ``waited_s``: waited in the whole process so far."""
        now = (time.perf_counter(), waited_s)
        last, self._last = self._last, now
        if last is None:
            return math.nan
        if counts:
            self._laps[by_plan].append((now[0] - last[0], now[1] - last[1]))
        return now[0] - last[0]

    def step_s(self, *, by_plan: bool) -> float | None:
        """Return the median seconds of a step; None without one."""
        laps = self._laps[by_plan]
        return statistics.median(seconds for seconds, _ in laps) if laps else None

    def waited_s(self) -> float:
        """Return the median seconds that this process waited in a step of the plan; NaN without one."""
        return statistics.median(waited for _, waited in self._laps[True]) if self._laps[True] else math.nan

    def idle_share(self) -> float:
        """Return the share of the plan's steps that was spent waiting; NaN without one."""
        total_s = sum(seconds for seconds, _ in self._laps[True])
        return sum(waited for _, waited in self._laps[True]) / total_s if total_s else math.nan


class Loop:
    """The steps of a run, with their measurements."""

    def __init__(
        self,
        recipe: Recipe,
        config: FitConfig,
        engine: Engine,
        loader: PlannedLoader,
        files: RunFiles,
        equal: Plan | None,
    ):
        self.recipe, self.config, self.engine, self.loader, self.files = recipe, config, engine, loader, files
        self.plan = loader.plan
        self.total_steps = config.steps or (config.epochs or 1) * len(loader)
        self.eval_dataset = recipe.eval_dataset() if recipe.eval_dataset is not None else None
        self.eval_loss: float | None = None
        self._equal = equal
        self._equal_from = self.total_steps // 2
        self.clock = Clock()
        self.last: StepResult | None = None
        shown = sys.stderr if config.progress and engine.comm.rank == 0 else None
        self._progress = Progress(self.total_steps, stream=shown)

    def run(self) -> None:
        scheduler = self.recipe.scheduler(self.engine.optimizer) if self.recipe.scheduler is not None else None
        for step, micro_batches in enumerate(self._steps(), start=1):
            result = self.engine.step(micro_batches)
            if scheduler is not None and not result.skipped:
                scheduler.step()
            self._log(step, result)
            if step == self.total_steps or (self.config.eval_every and step % self.config.eval_every == 0):
                self._evaluate(step)

    def _steps(self) -> Iterator[list[Batch | None]]:
        """Yield the run's steps, epoch after epoch; some in the middle are cut by the equal split."""
        step = 0
        while step < self.total_steps:
            for micro_batches in self.loader:
                yield micro_batches
                step += 1
                if step == self.total_steps:
                    return
                self._choose_split(step)

    def _choose_split(self, step: int) -> None:
        """Cut the step after ``step`` by the plan or by the equal split."""
        if self._equal is None:
            return
        compares = self._equal_from <= step < self._equal_from + self.config.compare_steps
        wanted = self._equal if compares else self.plan
        if self.loader.plan is not wanted:
            self.loader.set_plan(wanted)
            self.clock.restart()

    def _log(self, step: int, result: StepResult) -> None:
        num_samples = self._num_samples(step)
        by_plan = self.loader.plan is self.plan
        whole = num_samples == self.plan.global_batch_size
        seconds = self.clock.lap(self.engine.wait_s, by_plan=by_plan, counts=whole)
        tokens_per_s = result.weight / seconds if self.recipe.weight is not None else None
        self._progress.show(step, result.loss, num_samples / seconds, tokens_per_s)
        self.files.log(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            weight=result.weight,
            skipped=result.skipped,
            learning_rate=self.engine.optimizer.param_groups[0]["lr"],
            num_samples=num_samples,
            step_s=seconds,
            strategy=self.loader.plan.strategy,
        )
        self.last = result

    def _num_samples(self, step: int) -> int:
        """Return the samples of a step; the last one of an epoch may have fewer."""
        tail = len(self.loader.dataset) % self.plan.global_batch_size  # type: ignore[arg-type]  # checked to have one
        return tail if tail and step % len(self.loader) == 0 else self.plan.global_batch_size

    def _evaluate(self, step: int) -> None:
        if self.eval_dataset is None:
            return
        batches = list(eval_batches(self.eval_dataset, self.plan, self.engine.comm.rank, self.recipe.collate))
        self.eval_loss = self.engine.evaluate(batches)
        self.clock.restart()
        self._progress.say(f"step {step}: held-out loss {self.eval_loss:.4f}")
        self.files.log(step=step, eval_loss=self.eval_loss)
