"""One rank at one stage with nobody at the other end: the real engine, over ``ProbeComm``.

    RankProbe.trial(size)    does a micro-batch of this size train? two steps, accumulation, evaluation
    RankProbe.repeat(size)   some more micro-steps, for their seconds

[Note: seconds of a micro-step]
The engine calls the loss function once in every micro-step, so the time from one call to the next is one whole
micro-step: forward, backward, and what the stage does with the gradients. What a step takes beyond its micro-steps
(norm, clipping, optimizer) is then its total less so many micro-steps. Nothing in the engine needs to know.

[Note: out of memory]
A caught exception keeps the frames of its traceback alive, and with them the tensors that there was no room for. So the
handler only notes what happened; memory is given back after it has been left. The engine is then built anew: nothing of
the step that failed half way is carried into the next trial.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from torch import Tensor, nn

from poplar.config import Batch, Recipe
from poplar.device import Device, is_out_of_memory
from poplar.engine import Engine, LossFunction
from poplar.errors import ConfigError
from poplar.startup import initialize
from poplar.zero.comm import Communicator, Done, LoopbackComm, Work
from poplar.zero.tree import tensors_in

T = TypeVar("T")
NUM_SAMPLES_LOOKED_AT = 64
"""Without ``Recipe.probe``, so many samples, evenly spread, are looked at for the largest."""


class ProbeComm(LoopbackComm):
    """A loopback that keeps numbers sane, so that what is measured is a step as training takes it.

    At stages 0 to 2 every rank has whole parameters already, and they stay. At stage 3 those of other ranks are copies
    of the own shard: rubbish, but finite. In votes every number is finite, so that no step is skipped for the rubbish.

    Attributes:
        on_meta: whether the model was built on ``meta``, so that only rank 0 gives its parameters values.
    """

    def __init__(self, rank: int, world_size: int, zero_stage: int, device: Device):
        super().__init__(rank, world_size)
        self.on_meta = False
        self._zero_stage = zero_stage
        self._device = device

    def all_gather(self, full: Tensor, offsets: Sequence[int], name: str = "") -> Work:
        if self._zero_stage < 3:
            return Done()
        # An emulated card is not to be slow at copies that no card would make.
        self._device.pace()
        work = super().all_gather(full, offsets, name)
        self._device.mark()
        return work

    def broadcast(self, tensor: Tensor, src: int, name: str = "") -> None:
        if self.on_meta and src != self.rank and tensor.is_floating_point():
            tensor.normal_(0.0, 0.02)

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        return super().gather_floats([value if math.isfinite(value) else 0.0 for value in values])


class ProbeBatches:
    """The batches that a recipe is profiled with."""

    def __init__(self, recipe: Recipe, device: Device):
        self._recipe = recipe
        self._device = device
        self._samples: list[Any] = []

    def make(self, size: int) -> Batch:
        """Return ``Recipe.probe(size)``; without a probe, ``size`` samples as large as the largest looked at."""
        if self._recipe.probe is not None:
            return self._recipe.probe(size)
        if not self._samples:
            with self._device.uncounted():  # a data set lies in the host's memory
                self._samples = self._largest_samples()
        return self._recipe.collate([self._samples[index % len(self._samples)] for index in range(size)])

    def _largest_samples(self) -> list[Any]:
        dataset: Any = self._recipe.dataset()
        if not hasattr(dataset, "__len__") or len(dataset) == 0:
            raise ConfigError(f"the data set must be map-style and not empty; got {type(dataset).__name__}")
        number = min(NUM_SAMPLES_LOOKED_AT, len(dataset))
        # The last one included: data sets are often sorted by length.
        indices = [round(place * (len(dataset) - 1) / max(1, number - 1)) for place in range(number)]
        samples = [dataset[index] for index in indices]
        sizes = [sum(tensor.numel() for tensor in tensors_in(sample)) for sample in samples]
        return [sample for sample, size in zip(samples, sizes, strict=True) if size == max(sizes)]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What engines for measuring are built with; the same at every stage."""

    recipe: Recipe
    precision: str
    max_grad_norm: float | None = None
    shard_ratios: tuple[float, ...] | None = None
    units: Any = None

    def build(self, zero_stage: int, comm: Communicator, device: Device, watch: LossWatch | None = None) -> Engine:
        """Return an engine that steps as in training, but moves no weight. Collective over ``comm``."""
        with device.uncounted():
            model = self.recipe.model()
        if isinstance(comm, ProbeComm):
            comm.on_meta = any(param.is_meta for param in model.parameters())
        optimizer = self.recipe.optimizer(model)
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * 0
        return initialize(
            model,
            optimizer,
            self.recipe.loss if watch is None else watch.wrap(self.recipe.loss),
            zero_stage=zero_stage,
            weight=self.recipe.weight,
            reduction=self.recipe.reduction,
            precision=self.precision,
            max_grad_norm=self.max_grad_norm,
            shard_ratios=self.shard_ratios,
            units=self.units,
            comm=comm,
            device=device,
            debug=False,
        )


class LossWatch:
    """Notes when the loss function is called, on the device's clock."""

    def __init__(self, device: Device):
        self.calls_s: list[float] = []
        self._device = device

    def wrap(self, loss: LossFunction) -> LossFunction:
        def watched(module: nn.Module, batch: Batch) -> Tensor:
            self.calls_s.append(self._device.clock_s())
            return loss(module, batch)

        return watched


def give_back(device: Device) -> None:
    """Free what nobody holds any more."""
    # Autograd's graph is invisible to the collector: what it kept alive is garbage only once it is gone.
    before = None
    while before != device.allocated_bytes():
        before = device.allocated_bytes()
        gc.collect()
    device.empty_cache()
    device.reset_peak()


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
        # A plain CPU rank is metered for its memory alone: training runs without the meter, which costs time.
        self._trains_metered = device.is_emulated or device.torch_device.type != "cpu"

    @property
    def usable_bytes(self) -> int | None:
        """What this rank may use, less what was held before the probe. None: unknown."""
        limit = self.device.memory_limit_bytes
        return None if limit is None else limit - self._foreign_bytes

    @property
    def num_steps_timed(self) -> int:
        """Steps that ``optimizer_step_s`` rests on."""
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
        """Take two steps, one of them with accumulation, and evaluate; return the peak bytes, None if memory ran out.

        Raises:
            whatever else the recipe raises.
        """

        def run() -> int:
            engine = self._ready_engine()
            self.device.reset_peak()
            batch = self._batches.make(size)
            # The second begins with optimizer state, its second micro-step with gradients.
            self._step(engine, batch, size, 1, counts=self._trains_metered)
            self._step(engine, batch, size, 2, counts=self._trains_metered)
            if self._settings.recipe.eval_dataset is not None:
                engine.evaluate([batch])
            return self.device.peak_bytes() - self._foreign_bytes

        with self.device.metered():
            return self._attempt(run)

    def repeat(self, size: int, num_micro_steps: int) -> bool:
        """Take a step of some micro-steps for their seconds; return False if memory ran out."""

        def run() -> bool:
            self._step(self._ready_engine(), self._batches.make(size), size, num_micro_steps, counts=True)
            return True

        with self.device.metered() if self._trains_metered else contextlib.nullcontext():
            return self._attempt(run) is not None

    def close(self) -> None:
        """Give everything back."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        give_back(self.device)

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

    def _step(self, engine: Engine, batch: Batch, size: int, num_micro_steps: int, *, counts: bool) -> None:
        """Take a step, and note its seconds: see [Note: seconds of a micro-step]."""
        self._watch.calls_s.clear()
        began_s = self.device.clock_s()
        engine.step([batch] * num_micro_steps)
        total_s = self.device.clock_s() - began_s
        if not counts:
            return
        # At stage 3 a new engine runs the loss once more, for the order of its collectives.
        calls_s = self._watch.calls_s[-num_micro_steps:]
        runs_s = [after - before for before, after in zip(calls_s, calls_s[1:], strict=False)]
        if size == 1 and runs_s:
            # With more samples, what is left would be the noise of the micro-steps.
            self._rests_s.append(total_s - num_micro_steps * median(runs_s))
        elif self._rests_s:
            runs_s.append(total_s - sum(runs_s) - self.optimizer_step_s)
        self.runs_s.setdefault(size, []).extend(seconds for seconds in runs_s if seconds > 0)
