"""What is built to measure a recipe: its engine, the communicator of a rank that is alone, its batches."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from poplar.config import Batch, Recipe
from poplar.device import Device
from poplar.engine import Engine, LossFunction
from poplar.errors import ConfigError
from poplar.startup import initialize
from poplar.zero.comm import Communicator, Done, LoopbackComm, Work, raise_together
from poplar.zero.tree import tensors_in

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
        """Return ``Recipe.probe(size)``; without a probe, ``size`` samples as large as the largest looked at.

        Raises:
            ConfigError: the batch has no weight, so that a step would not compute anything.
        """
        if self._recipe.probe is not None:
            batch = self._recipe.probe(size)
        else:
            if not self._samples:
                with self._device.uncounted():  # a data set lies in the host's memory
                    self._samples = self._largest_samples()
            batch = self._recipe.collate([self._samples[index % len(self._samples)] for index in range(size)])
        if not self._has_weight(batch):
            raise ConfigError(
                f"the {size} samples to profile with have weight 0, so that there is nothing to compute; give "
                "Recipe.probe, which makes a batch that has weight"
            )
        return batch

    def _has_weight(self, batch: Batch) -> bool:
        weight = self._recipe.weight
        return weight is None or float(weight(batch)) > 0

    def _largest_samples(self) -> list[Any]:
        dataset: Any = self._recipe.dataset()
        if not hasattr(dataset, "__len__") or len(dataset) == 0:
            raise ConfigError(f"the data set must be map-style and not empty; got {type(dataset).__name__}")
        number = min(NUM_SAMPLES_LOOKED_AT, len(dataset))
        # The last one included: data sets are often sorted by length.
        indices = [round(place * (len(dataset) - 1) / max(1, number - 1)) for place in range(number)]
        samples = [dataset[index] for index in indices]
        # One whose labels are all masked is not computed; where all are, ``make`` says so.
        samples = [one for one in samples if self._has_weight(self._recipe.collate([one]))] or samples
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
        failure: Exception | None = None
        try:
            with device.uncounted():
                model = self.recipe.model()
            optimizer = self.recipe.optimizer(model)
            for group in optimizer.param_groups:
                if "lr" in group:
                    group["lr"] = group["lr"] * 0
        except Exception as error:
            failure = error
        raise_together(comm, failure, "could not build the recipe's model and optimizer")
        if isinstance(comm, ProbeComm):
            comm.on_meta = any(param.is_meta for param in model.parameters())
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
    # After an error in backward, autograd's queue of this thread still holds the nodes and gradients that were next;
    # another backward clears it.
    with torch.enable_grad(), device.uncounted():
        torch.zeros((), requires_grad=True).clone().backward()
    # Autograd's graph is invisible to the collector: what it kept alive is garbage only once it is gone.
    before = None
    while before != device.allocated_bytes():
        before = device.allocated_bytes()
        gc.collect()
    device.empty_cache()
    device.reset_peak()
