"""Global batches, cut by the plan: every rank gets its own micro-batches of the same sequence of samples.

    samples of an epoch, in one order that only (seed, epoch) decide
    |------ global batch 0 ------|------ global batch 1 ------|-- the tail --|
    | rank 0: 3, 3 | rank 1: 2   | ...                        | 1, 1 | 1     |

The cuts between global batches depend on the global batch size alone. The cuts inside one follow the plan: rank by
rank, and within a rank micro-step by micro-step. So another plan, world size or strategy moves samples between
ranks, never between steps; no sample is repeated to fill a batch up, and none is left out unless ``drop_last`` drops
the tail, which is the end of the whole sequence and not of any rank's part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from poplar.config import Batch, default_collate
from poplar.errors import CheckpointError, ConfigError, PlanMismatchError
from poplar.plan import Plan

LOADER_STATE_VERSION = 1

_DATA_LOADER_OPTIONS = (
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)
# What the random numbers of one (seed, epoch) are for; keeps the streams apart.
_FOR_ORDER, _FOR_WORKERS = 0, 1


def split_batch(sizes: Sequence[int], num_samples: int) -> list[int]:
    """Split ``num_samples`` in the proportions of ``sizes``, by largest remainder.

    Exact integer arithmetic; ties go to the earlier entry. No entry gets more than its size, and each gets its
    proportional share rounded down or up.

    Raises:
        ConfigError: ``num_samples`` is negative, or more than the sizes hold.
    """
    total = sum(sizes)
    if not 0 <= num_samples <= total:
        raise ConfigError(f"cannot split {num_samples} samples over sizes that hold 0 to {total}")
    if num_samples == 0:
        return [0] * len(sizes)
    shares = [size * num_samples // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(sizes[i] * num_samples % total))
    for i in by_remainder[: num_samples - sum(shares)]:
        shares[i] += 1
    return shares


def cut_global_batch(plan: Plan, num_samples: int) -> list[tuple[int, ...]]:
    """Return, by rank, the sizes of its micro-batches when the global batch has only ``num_samples``.

    First the ranks' shares, in proportion to their planned ones, so that a rank of many small micro-steps and a rank
    of one large one both keep their part; then each share over the rank's micro-steps. As many micro-steps as planned,
    some of size 0; none larger than planned.

    Raises:
        ConfigError: ``num_samples`` is negative, or more than the plan's global batch.
    """
    shares = split_batch([row.num_samples for row in plan.ranks], num_samples)
    return [tuple(split_batch(row.micro_batch_sizes, share)) for row, share in zip(plan.ranks, shares, strict=True)]


def eval_batches(
    dataset: Dataset,
    plan: Plan,
    rank: int | None = None,
    collate: Callable[[list[Any]], Batch] = default_collate,
    **data_loader_options: Any,
) -> Iterator[Batch | None]:
    """Yield this rank's micro-batches of one pass over a held-out set, for ``Engine.evaluate``.

    Over the ranks every sample comes exactly once. No micro-batch is larger than the rank's largest planned one. All
    ranks get equally many entries, at any stage: ``None`` where a rank has no sample, so that at stage 3 it still
    takes part in that micro-step's collectives. Arguments and errors are those of ``PlannedLoader``.
    """
    return _aligned_micro_batches(PlannedLoader(dataset, plan, rank, collate, shuffle=False, **data_loader_options))


def _aligned_micro_batches(loader: PlannedLoader) -> Iterator[Batch | None]:
    done = 0
    for micro_batches in loader:
        num_samples = loader._num_samples - done
        done = loader._num_samples
        for i, sizes in enumerate(zip_longest(*cut_global_batch(loader.plan, num_samples), fillvalue=0)):
            # A micro-step without samples on any rank is left out everywhere: a small set pays for few collectives.
            if any(sizes):
                yield micro_batches[i] if i < len(micro_batches) else None


class PlannedLoader:
    """Yield this rank's step, again and again: one micro-batch per micro-step, ``None`` where its size is 0.

    The loader is one position in an endless sequence of epochs: (epoch, samples of it that were yielded, over all
    ranks). ``for`` yields steps from the position to the end of its epoch:

    - the first loop is epoch 0, the next one epoch 1, and so on;
    - after a ``break``, the next loop goes on behind the last step that was yielded;
    - ``load_state_dict`` moves the position, ``set_plan`` keeps it; both also work inside a loop, from the next step
      on, and must then be called on all ranks at the same step.

    What workers have prefetched does not count as yielded. After an exception from the data set or a worker the
    position is still before the step that failed. Iterators of the same loader share its position.

    The order of samples, and the seeds of workers, come from ``seed`` and the position; torch's, numpy's and Python's
    global random states are neither read nor changed by the loader. Workers are seeded when they start, which is once
    an epoch and after each move, and differently on every rank; with ``persistent_workers`` they live on and keep
    their random state. Without workers the data set runs in this process, on this process's random state.

    The last global batch of an epoch may be smaller: it is split in the plan's proportions (``cut_global_batch``). All
    ranks have the same number of steps, and the same number of micro-steps where the plan has it so.

    Args:
        dataset: map-style: ``dataset[i]`` and ``len(dataset)``, the same on every rank.
        plan: whose row for this rank gives the sizes of its micro-batches.
        rank: this rank's row. None: its rank in torch's process group, else ``RANK`` of the environment, else 0.
        collate: makes a micro-batch of a list of samples.
        shuffle: a new order every epoch; else the data set's own.
        seed: of the order, the same on every rank.
        drop_last: leave the smaller last global batch out, on all ranks.
        data_loader_options: ``num_workers``, ``pin_memory``, ``persistent_workers``, ``prefetch_factor``, ``timeout``,
            ``worker_init_fn`` and ``multiprocessing_context`` of ``torch.utils.data.DataLoader``.
    Raises:
        ConfigError: the data set is empty or not map-style, or an option is wrong.
        PlanMismatchError: the plan has no row for the rank or is for another world size, or ``drop_last`` would drop
            every sample.
    Not collective: ranks talk to nobody.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan: Plan,
        rank: int | None = None,
        collate: Callable[[list[Any]], Batch] = default_collate,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        **data_loader_options: Any,
    ) -> None:
        self.dataset = dataset
        self.shuffle, self.seed, self.drop_last = bool(shuffle), seed, bool(drop_last)
        self._given_rank = rank
        self._dataset_length = _checked_length(dataset)
        if not _is_count(seed):
            raise ConfigError(f"seed must be an integer, 0 or more; got {seed!r}")
        self._epoch = 0
        self._num_samples = 0
        self._steps: Iterator[tuple[list[Batch | None], int]] | None = None
        self._feed = _Feed()
        self._generator = torch.Generator()
        self._data_loader = _data_loader(dataset, self._feed, collate, self._generator, data_loader_options)
        self.set_plan(plan)

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to, so that ``range(loader.epoch, num_epochs)`` fits after a resume."""
        return self._epoch + self._epoch_is_over()

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch."""
        steps, tail = divmod(self._dataset_length, self._plan.global_batch_size)
        return steps + (tail > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[Batch | None]]:
        self._pass_end_of_epoch()
        while True:
            yield self._next_step()
            # Only when the loop comes back for more: until then the position is that of the step at work, and the
            # loop's body may have moved it.
            if self._pass_end_of_epoch():
                return

    def set_plan(self, plan: Plan) -> None:
        """Cut by another plan from the next step on; the position stays.

        Raises:
            ConfigError: not a plan.
            PlanMismatchError: as for the constructor; the loader keeps its plan.
        """
        if not isinstance(plan, Plan):
            raise ConfigError(f"plan must be a poplar.Plan, got {type(plan).__name__}")
        _resolve_rank(self._given_rank, plan)
        if self.drop_last and self._dataset_length < plan.global_batch_size:
            raise PlanMismatchError(
                f"the data set has {self._dataset_length} samples, fewer than one global batch of "
                f"{plan.global_batch_size}: with drop_last no step would ever run; lower global_batch_size or set "
                "drop_last=False"
            )
        self._plan = plan
        self._steps = None

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of ``epoch``; where that is the epoch at hand, stay: a resumed one goes on.

        Raises:
            ConfigError: not an integer, 0 or more.
        """
        if not _is_count(epoch):
            raise ConfigError(f"epoch must be an integer, 0 or more; got {epoch!r}")
        self._pass_end_of_epoch()
        if epoch != self._epoch:
            self._move(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on every rank and for any world size and plan; it can be stored as JSON."""
        return {
            "version": LOADER_STATE_VERSION,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "dataset_length": self._dataset_length,
            "epoch": self._epoch,
            "num_samples": self._num_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position that ``state_dict`` gave, on any rank, with any world size, plan and global batch size.

        Raises:
            CheckpointError: the state is damaged, or was made with another data set, seed or ``shuffle``.
        """
        own = self.state_dict()
        missing = [name for name in own if name not in state]
        if missing:
            raise CheckpointError(f"the loader's state lacks {missing[0]!r}; it has {sorted(state)}")
        for name in ("version", "dataset_length", "shuffle", "seed"):
            if state[name] != own[name]:
                raise CheckpointError(
                    f"the loader's state was made with {name} {state[name]!r}, this loader has {own[name]!r}: the "
                    "samples would not be the same ones; build the loader as it was then, or start without its state"
                )
        epoch, num_samples = state["epoch"], state["num_samples"]
        if not _is_count(epoch) or not _is_count(num_samples) or num_samples > self._dataset_length:
            raise CheckpointError(
                f"the loader's state is damaged: expected an epoch from 0 and 0 to {self._dataset_length} samples, got "
                f"epoch {epoch!r} and {num_samples!r} samples"
            )
        self._move(epoch, num_samples)

    def _move(self, epoch: int, num_samples: int) -> None:
        self._epoch, self._num_samples = epoch, num_samples
        self._steps = None

    def _epoch_is_over(self) -> bool:
        remaining = self._dataset_length - self._num_samples
        return remaining < (self._plan.global_batch_size if self.drop_last else 1)

    def _pass_end_of_epoch(self) -> bool:
        """Go to the next epoch if no step of this one is left; return whether that was so."""
        over = self._epoch_is_over()
        if over:
            self._move(self._epoch + 1, 0)
        return over

    def _next_step(self) -> list[Batch | None]:
        if self._steps is None:
            self._steps = self._start()
        try:
            micro_batches, num_samples = next(self._steps)
        except BaseException:
            # What was prefetched lies behind the step that failed, and no longer fits the position.
            self._steps = None
            raise
        self._num_samples += num_samples
        return micro_batches

    def _start(self) -> Iterator[tuple[list[Batch | None], int]]:
        """Start torch's loader at the position; yield (this rank's micro-batches, samples of the global batch)."""
        rank = _resolve_rank(self._given_rank, self._plan)
        self._feed.rest = rest = _RestOfEpoch(self._plan, rank, self._order()[self._num_samples :])
        # With the position, so that a run resumed in the middle does not draw the beginning's augmentations again.
        self._generator.manual_seed(self._derive_seed(_FOR_WORKERS, self._epoch, self._num_samples, rank))
        return _take_steps(rest, iter(self._data_loader))

    def _order(self) -> Tensor:
        """Return the sample numbers of the epoch in order: 1D int64, (dataset_length,)."""
        if not self.shuffle:
            return torch.arange(self._dataset_length)
        generator = torch.Generator().manual_seed(self._derive_seed(_FOR_ORDER, self._epoch))
        return torch.randperm(self._dataset_length, generator=generator)

    def _derive_seed(self, *key: int) -> int:
        return int(np.random.SeedSequence(self.seed, spawn_key=key).generate_state(1, np.uint64)[0])


class _RestOfEpoch:
    """The rest of an epoch as one rank sees it; iterating gives the sample numbers of its micro-batches."""

    def __init__(self, plan: Plan, rank: int, order: Tensor) -> None:
        self._order = order
        self._global_batch_size = plan.global_batch_size
        self._full = _place(plan, rank, plan.global_batch_size)
        self._tail = _place(plan, rank, len(order) % plan.global_batch_size)

    def steps(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Yield per step: samples of the global batch, where this rank's begin in the order, micro-batch sizes."""
        for start in range(0, len(self._order), self._global_batch_size):
            num_samples = min(self._global_batch_size, len(self._order) - start)
            offset, sizes = self._full if num_samples == self._global_batch_size else self._tail
            yield num_samples, start + offset, sizes

    def __iter__(self) -> Iterator[list[int]]:
        for _, begin, sizes in self.steps():
            for size in sizes:
                if size > 0:
                    yield self._order[begin : begin + size].tolist()
                begin += size


class _Feed:
    """The batch sampler of torch's loader, which lives longer than one epoch (its workers may persist)."""

    rest: _RestOfEpoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.rest)


def _place(plan: Plan, rank: int, num_samples: int) -> tuple[int, tuple[int, ...]]:
    """Return how many samples of the global batch come before the rank's own, and its micro-batch sizes."""
    rows = cut_global_batch(plan, num_samples)
    return sum(map(sum, rows[:rank])), rows[rank]


def _take_steps(rest: _RestOfEpoch, batches: Iterator[Batch]) -> Iterator[tuple[list[Batch | None], int]]:
    for num_samples, _, sizes in rest.steps():
        micro_batches: list[Batch | None] = []
        for size in sizes:
            micro_batches.append(next(batches) if size > 0 else None)
        yield micro_batches, num_samples


def _data_loader(
    dataset: Dataset,
    feed: _Feed,
    collate: Callable[[list[Any]], Batch],
    generator: torch.Generator,
    options: dict[str, Any],
) -> DataLoader:
    unknown = sorted(set(options) - set(_DATA_LOADER_OPTIONS))
    if unknown:
        raise ConfigError(
            f"PlannedLoader has no option {unknown[0]!r}; for torch's DataLoader it takes "
            f"{', '.join(_DATA_LOADER_OPTIONS)}"
        )
    try:
        return DataLoader(dataset, batch_sampler=feed, collate_fn=collate, generator=generator, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"torch's DataLoader refuses the options {options}: {error}") from error


def _checked_length(dataset: Dataset) -> int:
    map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not map_style or isinstance(dataset, (type, IterableDataset)):
        kind = dataset.__name__ if isinstance(dataset, type) else type(dataset).__name__
        raise ConfigError(
            f"dataset must be map-style, an object with __len__ and __getitem__; got {kind}. A stream cannot be cut "
            "into the same global batches for every plan: give its samples numbers"
        )
    length = len(dataset)  # type: ignore[arg-type]
    if length == 0:
        raise ConfigError("the data set is empty: no step would ever run")
    return length


def _resolve_rank(rank: int | None, plan: Plan) -> int:
    """Return the rank, asked for anew at every start: a launcher's group may be joined after the loader is built."""
    if rank is None and dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        plan.check_cluster(dist.get_world_size())
    elif rank is None:
        try:
            rank = int(os.environ.get("RANK", "0"))
        except ValueError as error:
            raise ConfigError(f"the environment's RANK must be an integer; got {os.environ['RANK']!r}") from error
    if not _is_count(rank):
        raise ConfigError(f"rank must be an integer, 0 or more, or None; got {rank!r}")
    if rank >= plan.world_size:
        raise PlanMismatchError(
            f"rank {rank} has no row in the plan, which is for {plan.world_size} ranks; make a new plan, or start "
            f"{plan.world_size} ranks"
        )
    return rank


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
