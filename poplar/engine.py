"""One optimizer step over micro-batches, exactly as one process on the whole global batch.

    step(micro_batches)
      agree      one small collective: total weight, number of micro-steps, complaints
      compute    each micro-batch: forward, loss x (its weight / total weight), backward; the stage reduces by SUM only
      decide     one small collective: loss, norm, non-finite values, failures; the same decision on every rank
      update     clip, optimizer.step(), publish the shards

[Note: exactness]
A micro-batch's loss is a mean over its own weight (samples, or valid tokens). Multiplied by weight / total weight
before backward, the sum over micro-batches and ranks is the mean over the global batch, and so are gradients, for any
split. Nothing is divided afterwards. A micro-batch of weight 0 has the mean 0/0: it is not computed at all, and adds
exactly 0.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from poplar.config import REDUCTIONS, Batch
from poplar.errors import CommunicationError, ConfigError, ModelError, NonFiniteError, StepError
from poplar.zero.build import Layout, build, layout_signature
from poplar.zero.clip import check_norm_type, clip_coefficient, global_norm, local_norm_part
from poplar.zero.comm import check_same, raise_failure, raise_together
from poplar.zero.debug import CheckedComm, check_replicas
from poplar.zero.optimizer import whole_states
from poplar.zero.precision import LossScale, PoplarWarning
from poplar.zero.state import whole_optimizer_state, whole_params
from poplar.zero.tree import common_first_dimension, move_to
from poplar.zero.units import Unit, clean_name
from poplar.zero.watch import ModelWatch

if TYPE_CHECKING:
    import os


LossFunction = Callable[[nn.Module, Batch], Tensor]
WeightFunction = Callable[[Batch], "float | Tensor"]

NON_FINITE_CHOICES = ("skip", "raise")


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on every rank."""

    loss: float
    """Weighted mean over the global batch (the sum, with reduction "sum"), before the update."""
    grad_norm: float
    """Norm of the global gradient, before clipping."""
    weight: float
    """Total weight (samples, or tokens) of the step."""
    skipped: bool
    """Whether the optimizer was left alone: gradients not finite, or nothing to learn from."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How a step is made; fields as in ``initialize``."""

    weight: WeightFunction | None = None
    reduction: str = "mean"
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    norm_type: float = 2.0
    non_finite: str = "skip"
    max_skipped_steps: int = 50

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ConfigError(f"reduction must be one of {', '.join(REDUCTIONS)}; got {self.reduction!r}")
        if self.non_finite not in NON_FINITE_CHOICES:
            raise ConfigError(f"non_finite must be one of {', '.join(NON_FINITE_CHOICES)}; got {self.non_finite!r}")
        for name in ("max_grad_norm", "max_grad_value"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, or None; got {value!r}")
        object.__setattr__(self, "norm_type", check_norm_type(self.norm_type))


@dataclass
class _Tally:
    """What this rank gathers in one step."""

    losses: list[Tensor] = field(default_factory=list)
    failure: BaseException | None = None


def _note_failure(tally: _Tally, error: Exception) -> None:
    """Remember the first failure, and let go of what the failed computation holds.

    After an out-of-memory, the collectives that are still to be completed need that memory.
    """
    if tally.failure is None:
        tally.failure = error
    traceback.clear_frames(error.__traceback__)


_engines: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
"""Models whose parameters and hooks are an engine's; another engine would break both."""


def check_has_no_engine(module: nn.Module) -> None:
    """Refuse a model that an engine trains.

    Raises:
        ConfigError: it does.
    """
    if module in _engines:
        raise ConfigError("the model has an engine already; call its close(), or build the model anew")


class Engine:
    """Trains a model over the ranks of a group. Made by ``initialize``.

    Attributes:
        module: the model; between steps its parameters are whole at stages 0 to 2, sharded at stage 3.
        optimizer: the user's own object; its groups now hold this rank's shards, so schedulers work as usual.
        num_steps: real optimizer steps taken.
        num_skipped: steps skipped.
        wait_s: seconds that this process has spent in collectives, waiting and, through shared memory, copying. On an
            accelerator the host does not wait, so that little but votes counts.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        layout: Layout,
        settings: StepSettings,
    ):
        self.module = module
        self.optimizer = optimizer
        self.comm = layout.comm
        self.device = layout.device
        self.loss_scale = LossScale(enabled=layout.precision.name == "fp16")
        self.num_steps = 0
        self.num_skipped = 0
        self._loss = loss
        self._layout = layout
        self._settings = settings
        self._skipped_in_a_row = 0
        self._is_unsharded = False
        self._broken: str | None = None  # why the ranks' weights may differ
        self._vote_wait_s = 0.0
        self._stage, self._binding = build(module, optimizer, layout, whole_states(optimizer))
        _engines[module] = True
        self._signature = layout_signature(self._stage.units)
        self._watch = ModelWatch(module)

    @property
    def zero_stage(self) -> int:
        return self._stage.number

    @property
    def units(self) -> list[Unit]:
        """The model's units: see ``poplar.zero.units``."""
        return self._stage.units

    @property
    def precision(self) -> str:
        return self._layout.precision.name

    @property
    def wait_s(self) -> float:
        return self._vote_wait_s + self._stage.wait_s

    # Training.

    def step(self, micro_batches: Sequence[Batch | None]) -> StepResult:
        """Take one optimizer step over the ranks' micro-batches.

        Args:
            micro_batches: this rank's, any number, also none; None stands for an idle micro-step.

        Raises:
            StepError: another rank failed, and the step was discarded on every rank; that rank raises its own error.
            NonFiniteError: with ``non_finite="raise"``, or after too many skipped steps in a row.
            CommunicationError: another rank is in ``evaluate``.
        Collective.
        """
        batches, weights, total, count = self._agree(micro_batches, training=True)
        if total == 0:
            self.num_skipped += 1
            warnings.warn(
                "a step had no weight on any rank (no samples, or all labels masked); skipped", PoplarWarning, 2
            )
            return StepResult(loss=math.nan, grad_norm=0.0, weight=0.0, skipped=True)
        stage, tally = self._stage, _Tally()
        self._record(batches, weights, count, training=True)
        with torch.enable_grad():
            if stage.reduces_every_micro_step:
                for index in range(count):
                    has_samples = index < len(batches) and weights[index] > 0
                    self._micro_step(
                        tally, batches[index] if has_samples else None, self._factor(weights, index, total), True
                    )
            else:
                computed = [index for index in range(len(batches)) if weights[index] > 0]
                for index in computed:
                    self._micro_step(tally, batches[index], self._factor(weights, index, total), index == computed[-1])
                if not computed:
                    self._micro_step(tally, None, 0.0, is_last=True)
        return self._conclude(tally, total)

    def _factor(self, weights: Sequence[float], index: int, total: float) -> float:
        """Return what a micro-batch's loss is multiplied by: see [Note: exactness]."""
        if index >= len(weights):
            return 0.0
        return weights[index] / total if self._settings.reduction == "mean" else 1.0

    def _micro_step(self, tally: _Tally, batch: Batch | None, factor: float, is_last: bool) -> None:
        """Train on ``batch``; with None, or after a failure, take part in what the other ranks do."""
        stage = self._stage
        if tally.failure is not None:
            if not stage.reduces_every_micro_step:
                return  # ``abandon`` has reduced for the whole step
            batch = None
        try:
            if batch is None:
                stage.idle_micro_step(is_last)
            else:
                self._train_on(tally, batch, factor, is_last)
        except Exception as error:
            # The others are waiting in this micro-step's collectives: complete them, and tell at the end of the step.
            _note_failure(tally, error)
            stage.abandon()

    def _train_on(self, tally: _Tally, batch: Batch, factor: float, is_last: bool) -> None:
        stage = self._stage
        self.device.mark()
        stage.begin_forward(training=True)
        loss = self._compute_loss(batch)
        stage.begin_backward(is_last)
        if not loss.requires_grad:
            raise ModelError(
                "the loss does not depend on any trainable parameter: it was detached, made under torch.no_grad, or "
                "does not use the model that it is given"
            )
        loss.backward(torch.full_like(loss, factor * self.loss_scale.value))
        tally.losses.append(loss.detach().double() * factor)
        stage.end_backward()
        self.device.pace()

    def _compute_loss(self, batch: Batch) -> Tensor:
        batch = move_to(batch, self.device.torch_device)
        with self._layout.precision.autocast(self.device.torch_device), self._stage.saving():
            loss = self._loss(self.module, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelError(
                f"the loss function must return a scalar tensor, the mean over the batch's weight; got {got}"
            )
        return loss.reshape(())

    def _conclude(self, tally: _Tally, total: float) -> StepResult:
        """Decide together what becomes of the step, and do it."""
        stage = self._stage
        try:
            self._finish_reductions(tally)
            self.device.mark()
            rows = self._report(tally)
            if any(row[1] for row in rows):
                late = self.comm.gather_objects(stage.late_units())
                stage.reduce_late(sorted({index for indices in late for index in indices or []}))
                rows = self._report(tally)
            self._raise_failures(tally.failure, [row[0] for row in rows], "failed in a step")
            loss = math.fsum(row[2] for row in rows)
            norm = global_norm([row[3] for row in rows], self._settings.norm_type) / self.loss_scale.value
            finite = math.isfinite(norm) and math.isfinite(loss)
            if finite:
                self._update(norm)
            result = StepResult(loss=loss, grad_norm=norm, weight=total, skipped=not finite)
        finally:
            stage.clear_gradients()
        stage.agree_on_order()
        if isinstance(self.comm, CheckedComm):
            check_replicas(stage, self.optimizer, self.loss_scale.value)
        self._take_note(result, [row[2] for row in rows])
        return result

    def _finish_reductions(self, tally: _Tally) -> None:
        try:
            self._stage.finish_reductions()
        except Exception as error:  # no memory for a shard's gradient, say: the others are about to vote
            _note_failure(tally, error)
            self._stage.finish_reductions()

    def _report(self, tally: _Tally) -> list[list[float]]:
        """Return each rank's (failed, late units, loss, part of the norm)."""
        grads = [g for _, buffer in self._stage.trainable_buffers() if (g := buffer.owned_grad()) is not None]
        loss = torch.stack(tally.losses).sum().item() if tally.losses else 0.0
        part = local_norm_part(grads, self._settings.norm_type) if self.comm.replica == 0 else 0.0
        return self._vote([float(tally.failure is not None), float(len(self._stage.late_units())), loss, part])

    def _update(self, norm: float) -> None:
        settings = self._settings
        coefficient = clip_coefficient(norm, settings.max_grad_norm) / self.loss_scale.value
        for _, buffer in self._stage.trainable_buffers():
            if buffer.grad is None:
                continue
            if coefficient != 1.0:
                buffer.grad.mul_(coefficient)
            if settings.max_grad_value is not None:
                buffer.grad.clamp_(-settings.max_grad_value, settings.max_grad_value)
        problem: Exception | None = None
        try:
            self._binding.step()
        except Exception as error:
            problem = error
            self._broken = f"{type(error).__name__}: {error}"
        if self.num_steps == 0:
            # The optimizer makes its state now, and may run out of memory on one rank alone.
            try:
                raise_together(self.comm, problem, "failed in the optimizer's first step")
            except Exception as error:
                self._broken = self._broken or str(error)
                raise
        elif problem is not None:
            # No vote follows in this step, and the others are about to publish: be there, and tell in the next step.
            self._stage.publish()
            raise problem
        for _, buffer in self._stage.trainable_buffers():
            if buffer.master is not buffer.shard:
                buffer.shard.copy_(buffer.master)
        self._stage.publish()
        self.device.pace()

    def _take_note(self, result: StepResult, losses: Sequence[float]) -> None:
        """Count, scale, warn or stop; the same on every rank."""
        self.loss_scale.update(overflow=result.skipped)
        if not result.skipped:
            self.num_steps += 1
            self._skipped_in_a_row = 0
            return
        self.num_skipped += 1
        self._skipped_in_a_row += 1
        culprits = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        where = f"the loss of ranks {culprits}" if culprits else "the gradient"
        step = self.num_steps + self.num_skipped
        text = f"step {step}: {where} was not finite (loss {result.loss}, norm {result.grad_norm})"
        if self._settings.non_finite == "raise" and not self.loss_scale.enabled:
            raise NonFiniteError(f"{text}; weights are those before the step")
        if self._skipped_in_a_row >= self._settings.max_skipped_steps:
            raise NonFiniteError(
                f"{text}, {self._skipped_in_a_row} steps in a row; lower the learning rate or check the data"
            )
        scale = f"; loss scale is now {self.loss_scale.value}" if self.loss_scale.enabled else ""
        warnings.warn(f"{text}; skipped on every rank{scale}", PoplarWarning, stacklevel=4)

    # Evaluation.

    def evaluate(self, micro_batches: Sequence[Batch | None]) -> float:
        """Return the weighted mean loss over the ranks' micro-batches; no gradients, modules in evaluation mode.

        NaN if they have no weight at all.

        Raises:
            StepError, CommunicationError: as in ``step``.
        Collective: with any number of micro-batches on each rank, also none.
        """
        batches, weights, total, count = self._agree(micro_batches, training=False)
        if total == 0:
            return math.nan
        stage, tally = self._stage, _Tally()
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            self._record(batches, weights, count, training=False)
            for index in range(count):
                has_samples = index < len(batches) and weights[index] > 0 and tally.failure is None
                if not has_samples:
                    stage.idle_micro_step(is_last=False, training=False)
                    continue
                self._evaluate_one(tally, batches[index], self._factor(weights, index, total))
        finally:
            for module, mode in modes:
                module.training = mode
        loss = torch.stack(tally.losses).sum().item() if tally.losses else 0.0
        rows = self._vote([float(tally.failure is not None), loss])
        self._raise_failures(tally.failure, [row[0] for row in rows], "failed in evaluation")
        return math.fsum(row[1] for row in rows)

    @torch.no_grad()
    def _evaluate_one(self, tally: _Tally, batch: Batch, factor: float) -> None:
        try:
            self.device.mark()
            self._stage.begin_forward(training=False)
            tally.losses.append(self._compute_loss(batch).double() * factor)
        except Exception as error:
            _note_failure(tally, error)
        self._stage.end_forward()

    # Agreement.

    def _agree(
        self, micro_batches: Sequence[Batch | None], training: bool
    ) -> tuple[list[Batch], list[float], float, int]:
        """Return this rank's batches and weights, the ranks' total weight, and their largest number of micro-steps."""
        problem: BaseException | None = None
        batches: list[Batch] = []
        weights: list[float] = []
        try:
            if self._is_unsharded:
                raise ConfigError("step and evaluate cannot run inside `with engine.unsharded():`")
            if self._broken is not None:
                raise StepError(
                    f"the optimizer failed in an earlier step ({self._broken}), so that some weights may be updated "
                    "and others not; go on from a checkpoint (engine.load)"
                )
            self._watch.check()
            batches = list(micro_batches)
            weights = [0.0 if batch is None else self._weigh(batch) for batch in batches]
        except Exception as error:
            problem = error
        signature = layout_signature(self._stage.units)
        changed = signature != self._signature
        call = 1.0 + training  # never 0, which is what a loopback's other ranks answer
        rows = self._vote([float(problem is not None), math.fsum(weights), float(len(batches)), float(changed), call])
        if len({row[4] for row in rows} - {0.0}) > 1:
            training_ranks = [rank for rank, row in enumerate(rows) if row[4] == 2.0]
            raise CommunicationError(
                f"ranks {training_ranks} called step, the others evaluate; every rank must make the same calls in the "
                "same order (so no `if rank == 0:` around them)"
            )
        self._raise_failures(problem, [row[0] for row in rows], "was given bad micro-batches")
        if any(row[3] for row in rows):
            self._rebuild()
        return batches, weights, math.fsum(row[1] for row in rows), int(max(row[2] for row in rows))

    def _weigh(self, batch: Batch) -> float:
        weight = self._settings.weight
        value = float(common_first_dimension(batch) if weight is None else weight(batch))
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"the weight of a micro-batch must be finite and 0 or more; got {value} on rank {self.comm.rank}"
            )
        return value

    def _vote(self, values: Sequence[float]) -> list[list[float]]:
        began = time.perf_counter()
        rows = self.comm.gather_floats(values)
        self._vote_wait_s += time.perf_counter() - began
        return rows

    def _raise_failures(self, own: BaseException | None, failed: Sequence[float], what: str) -> None:
        """Raise on every rank if one has failed: its own error there, StepError elsewhere."""
        if any(failed):
            self._stage.forget_orders()
            raise_failure(self.comm, own, what)

    def _record(self, batches: Sequence[Batch], weights: Sequence[float], count: int, training: bool) -> None:
        """Agree on the order of a micro-step's collectives, where the stage needs one and has none."""
        stage = self._stage
        if not stage.needs_recording(training):
            return
        own = next((index for index, weight in enumerate(weights) if weight > 0), None)
        has_samples = self._vote([float(own is not None)])
        leader = next(rank for rank, row in enumerate(has_samples) if row[0])

        def compute() -> None:
            assert own is not None
            with torch.set_grad_enabled(training):
                stage.begin_forward(training=training)
                loss = self._compute_loss(batches[own])
                if not training:
                    stage.end_forward()
                    return
                stage.begin_backward(is_last=False)
                if loss.requires_grad:
                    loss.backward()
                stage.end_backward()

        stage.record(training, leader, compute)

    # Whole parameters and state.

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        """Give whole parameters on every rank, for generation, inspection or surgery; yields the module.

        Inside, the model may be called any number of times on each rank. Changes to parameters are kept, and must be
        the same on every rank.
        Collective: entering and leaving.
        """
        self._stage.unshard_all()
        self._is_unsharded = True
        try:
            yield self.module
        finally:
            self._is_unsharded = False
            self._stage.reshard_all()
            for _, buffer in self._stage.trainable_buffers():
                if buffer.master is not buffer.shard:
                    # Only what was changed: the shard has fewer digits than its master.
                    is_same = buffer.master.to(buffer.dtype) == buffer.shard
                    buffer.master.copy_(torch.where(is_same, buffer.master, buffer.shard))

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return parameters (masters where there are any) and buffers, whole, by name, on the CPU. Collective."""
        named: dict[str, Tensor] = {}
        for piece, whole in whole_params(self._stage):
            named.update(dict.fromkeys(piece.names, whole))
        order = [clean_name(name) for name in self.module.state_dict(keep_vars=True)]
        buffers = {clean_name(name): value for name, value in self.module.state_dict().items()}

        def copied(value: Any) -> Any:  # a module's extra state need not be a tensor
            return value.detach().cpu().clone() if isinstance(value, Tensor) else value

        return {name: named[name] if name in named else copied(buffers[name]) for name in order}

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, whole, by original parameter name, on the CPU.

        Returns:
            {"state": {name: {entry: tensor or number}}, "param_groups": [{..., "params": [names]}]}; a tied parameter
            stands under its first name.
        Collective.
        """
        state = {piece.names[0]: entries for piece, entries in whole_optimizer_state(self._stage, self._binding)}
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": []}
            for group in self.optimizer.param_groups
        ]
        for unit in self._stage.units:
            for buffer in unit.buffers:
                for piece in buffer.pieces:
                    if piece.group >= 0:
                        groups[piece.group]["params"].append(piece.names[0])
        return {"state": state, "param_groups": groups}

    def _rebuild(self) -> None:
        """Cut anew, after parameters were frozen or unfrozen. Collective."""
        check_same(self.comm, layout_signature(self._stage.units), "which parameters require gradients")
        params = list(whole_params(self._stage))
        states = {piece.param: entries for piece, entries in whole_optimizer_state(self._stage, self._binding)}
        groups = {piece.param: piece.group for piece, _ in params}
        self._stage.close()
        for piece, whole in params:
            piece.param.data = whole  # on the CPU: building moves unit by unit, and the card may not hold them all
        layout = self._layout
        self._layout = Layout(**{**vars(layout), "groups": groups})
        self._stage, self._binding = build(self.module, self.optimizer, self._layout, states)
        self._signature = layout_signature(self._stage.units)

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint that any stage, world size, split or shard ratio can load: ``poplar.checkpoint``.

        Args:
            path: a folder, written by rank 0; an older checkpoint there is replaced once the new one is complete.
            extra: what ``load`` is to return, such as ``loader.state_dict()`` and ``scheduler.state_dict()`` by name.
        Collective.
        """
        from poplar.checkpoint import save_checkpoint

        save_checkpoint(self, path, extra)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Read a checkpoint written by ``save`` at any stage, world size, split or shard ratio; return its ``extra``.

        Collective; rank 0 reads.
        """
        from poplar.checkpoint import load_checkpoint

        extra = load_checkpoint(self, path)
        self._broken = None
        return extra

    def close(self) -> None:
        """Remove the hooks from the model. At stage 3 its parameters stay sharded."""
        self._stage.close()
        self._watch.close()
        _engines.pop(self.module, None)
