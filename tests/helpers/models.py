"""The table of awkward models: one line each. ``tests/distributed/test_awkward_models.py`` runs every line.

To add a model: write it in ``zoo.py`` (or here, in a lambda) and add a line to ``CASES``. What a line leaves out is the
default of ``Case``: vectors, cross entropy, SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import zoo

Batch = tuple[Tensor, Tensor]
NUM_SAMPLES = 9


def logits_of(output: Any) -> Tensor:
    """Return the first tensor of a model's output."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        return output["logits"]
    return output[0] if isinstance(output, tuple) else output.logits


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(logits_of(model(x)).flatten(0, -2), y.flatten(), ignore_index=-1)


def num_labels(batch: Batch) -> Tensor:
    """Return the denominator of ``cross_entropy``, as a tensor."""
    return (batch[1] != -1).sum()


def vectors(step: int) -> Batch:
    """Return the global batch of a step: (n, 6) numbers and (n,) classes."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(NUM_SAMPLES, zoo.WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, zoo.CLASSES, (NUM_SAMPLES,), generator=generator)


def tokens(step: int) -> Batch:
    """Return (n, 4) tokens and labels, half of them masked; samples 0 and 5 are masked wholly."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(0, zoo.VOCABULARY, (NUM_SAMPLES, 4), generator=generator)
    y = torch.randint(0, zoo.VOCABULARY, (NUM_SAMPLES, 4), generator=generator)
    y[torch.rand(NUM_SAMPLES, 4, generator=generator) < 0.5] = -1
    y[0] = y[5] = -1
    return x, y


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw_two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Decay and its own rate for matrices, neither for the rest, told apart by the original shapes."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)


def _aux_loss(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model, batch) + 0.1 * torch.stack([block.side for block in model.blocks]).sum(0).mean()


def _contrastive(model: nn.Module, batch: Batch) -> Tensor:
    """Two forwards before the backward."""
    x, y = batch
    return F.cross_entropy(model(x) + model(-x).square(), y)


def _two_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (F.cross_entropy(model(x), y) + model(2 * x).square().mean()) / 2


def _by_methods(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model.head(model.encode(model.blocks[0](x))), y)


def _gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    x = x.detach().requires_grad_()
    loss = F.cross_entropy(model(x), y, reduction="none")
    if not torch.is_grad_enabled():
        return loss.mean()
    (slope,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
    return (loss + slope.square().sum(1)).mean()


def _thaw(model: nn.Module, step: int) -> None:
    """Freeze a block before step 1, half of another before step 2, thaw the first before step 3."""
    if step == 1:
        model.blocks[0].requires_grad_(False)
    elif step == 2:
        model.blocks[1].up.requires_grad_(False)
    elif step == 3:
        model.blocks[0].requires_grad_(True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, and what is to be done with it."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], Batch] = vectors
    """Step -> global batch."""
    loss: Callable[[nn.Module, Batch], Tensor] = cross_entropy
    weight: Callable[[Batch], Any] | None = num_labels
    reduction: str = "mean"
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    before_step: Callable[[nn.Module, int], None] = lambda model, step: None
    """Called with the model and the number of the step, on every rank, before each step."""
    num_steps: int = 3
    max_grad_norm: float | None = None
    units: Any = None
    is_slow: bool = False
    """Run on two ranks at stages 0 and 3 alone."""
    may_be_refused: bool = False
    """Control flow by sample: stage 3 may end in a ScheduleError on every rank instead."""

    def __repr__(self) -> str:
        return self.name


def _case(name: str, model: Callable[[], nn.Module], **changes: Any) -> Case:
    return Case(name=name, model=model, **changes)


CASES = (
    _case("plain", zoo.Plain),
    _case("tied_across_units", zoo.TiedAcross, data=tokens),  # Z08
    _case("tied_within_unit", zoo.TiedWithin),
    _case("tied_blocks", zoo.TiedBlocks),  # Z09
    _case("same_block_twice", zoo.SameBlockTwice),
    _case("used_twice", zoo.UsedTwice),
    _case("recurrent_cell", zoo.Recurrent),
    _case("two_forwards", zoo.Plain, loss=_contrastive),
    _case("two_losses", zoo.Plain, loss=_two_losses),
    _case("siamese_reentrant", partial(zoo.Siamese, True)),  # Z01, Z07
    _case("siamese_non_reentrant", partial(zoo.Siamese, False)),  # Z01, Z07
    _case("checkpoint_shared_reentrant", partial(zoo.CheckpointedShared, True)),  # Z05
    _case("checkpoint_shared_non_reentrant", partial(zoo.CheckpointedShared, False)),  # Z05
    _case("checkpoint_nested", zoo.NestedCheckpoint),
    _case("gradient_penalty", zoo.Plain, loss=_gradient_penalty),
    _case("low_rank", zoo.LowRankMix, max_grad_norm=0.1),  # Z29
    _case("low_rank_checkpointed", partial(zoo.LowRankMix, True)),  # Z05
    _case("frozen_start", zoo.FrozenStart),
    _case("frozen_interleaved", zoo.FrozenInterleaved),
    _case("freeze_and_thaw", partial(zoo.Plain, 3), before_step=_thaw, num_steps=5),
    _case("freeze_and_thaw_adamw", zoo.Plain, before_step=_thaw, num_steps=5, optimizer=adamw_two_groups),
    _case("no_grad_pass", zoo.NoGradPass),
    _case("unused", zoo.Unused, optimizer=adamw_two_groups),
    _case("experts", zoo.Experts),
    _case("early_exit", zoo.EarlyExit, may_be_refused=True),
    _case("skipped_in_evaluation", zoo.SkippedInEvaluation),  # Z17
    _case("scalars", zoo.Scalars, optimizer=adamw_two_groups),
    _case("zero_elements", zoo.ZeroElements),  # Z22
    _case("one_element", zoo.OneElement, optimizer=adamw_two_groups),  # Z23
    _case("primes", zoo.Primes),  # Z26
    _case("transposed", zoo.Transposed, optimizer=adamw_two_groups),
    _case("channels_last", zoo.ChannelsLast),
    _case("complex", zoo.Complex, optimizer=adamw_two_groups, max_grad_norm=0.1),
    _case("frozen_integers", zoo.FrozenIntegers),
    _case("functional_head", zoo.FunctionalHead, data=tokens),  # Z15
    _case("foreign_weight", zoo.ForeignWeight),  # Z15
    _case("asked_for_dtype", zoo.AskedForDtype),
    _case("parameter_containers", zoo.ParameterContainers),
    _case("methods", zoo.Methods, loss=_by_methods),
    _case("returns_tuple", zoo.ReturnsTuple),
    _case("returns_dict", zoo.ReturnsDict),
    _case("returns_dataclass", zoo.ReturnsDataclass),
    _case("side_output", zoo.SideOutput, loss=_aux_loss),
    _case("buffers", zoo.Buffers),
    _case("frozen_statistics", zoo.FrozenStatistics),
    _case("delegating_wrapper", zoo.Delegating),  # Z13
    _case("delegating_blocks", zoo.DelegatingBlocks),  # Z13
    _case("compiled", zoo.Compiled, is_slow=True),
    _case("compiled_aot", partial(zoo.Compiled, "aot_eager"), is_slow=True),
    _case("own_function", zoo.OwnFunction),
    _case("weight_norm", zoo.WeightNorm),
    _case("encoder", zoo.Encoder, data=tokens),
    _case("attention", zoo.Attention, data=tokens),
    _case("lstm", zoo.Lstm, data=tokens),
    _case("in_place", zoo.InPlace),
    _case("nested_lists", zoo.NestedLists),
    _case("root_alone", partial(nn.Linear, zoo.WIDTH, zoo.CLASSES)),
    _case("sequential", lambda: nn.Sequential(zoo.Block(), nn.Tanh(), nn.Linear(zoo.WIDTH, zoo.CLASSES))),
    _case("units_by_predicate", zoo.Plain, units=lambda name, module: isinstance(module, nn.Linear)),
    _case("units_none", zoo.Plain, units=()),
)
