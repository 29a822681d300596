"""Settings of a run. The command line's flags mirror the fields; the resolved settings are written beside every run."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from poplar.catalog import parse_cluster
from poplar.config import PRECISIONS, STRATEGIES, ZERO_STAGES
from poplar.errors import ConfigError, PlanMismatchError
from poplar.plan import Plan, rows_by_rank


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How ``fit`` trains.

    Raises:
        ConfigError: a field is out of range, or two fields contradict each other.
    """

    global_batch_size: int
    """Samples of every optimizer step, over all ranks and micro-steps."""
    steps: int | None = None
    """Optimizer steps to take. None: ``epochs`` decides."""
    epochs: int | None = None
    """Passes over the data set. None: 1 where ``steps`` is None too."""
    zero_stage: int | str = "auto"
    """0, 1, 2 or 3; "auto" takes the fastest predicted among those that fit."""
    strategy: str = "exact"
    """How the global batch is split: "exact", "poplar", "flops" or "equal"."""
    plan: Plan | None = None
    """A plan made before; nothing is profiled then. It sets stage, precision and strategy."""
    micro_batch_sizes: tuple[tuple[int, ...], ...] | None = None
    """Own sizes of every rank's micro-steps; nothing is profiled then. They add up to ``global_batch_size``."""
    precision: str = "fp32"
    max_grad_norm: float | None = None
    """Clip the global gradient norm to this. None: do not clip."""
    emulate: str | None = None
    """Cards that CPU ranks stand for, as "v100-16g:2,t4-16g:2"."""
    memory_fractions: tuple[float, ...] | None = None
    """Share of its memory that each rank may use; one entry stands for all ranks."""
    reuse: bool = False
    """Take earlier profiles where nothing that matters has changed since; keep new ones for later."""
    refresh: bool = False
    """Measure anew, and replace the profiles kept for ``reuse``."""
    backend: str | None = None
    """Library of the collectives, "nccl" or "gloo". None: nccl for GPUs, else gloo."""
    seed: int = 0
    """Of the weights and of the order of samples; dropout draws from it and the rank."""
    eval_every: int | None = None
    """Steps between evaluations on the held-out set. None: at the end alone."""
    compare_steps: int = 0
    """Steps that are cut as the equal split would cut them, to measure what the plan gains. The samples of a step and
    its result are the same either way."""
    num_workers: int = 0
    """Processes that load data, for each rank."""
    run_dir: str | None = None
    """Where metrics, plan, profile and settings are written. None: nowhere."""
    progress: bool = True
    """Whether rank 0 shows the plan, the progress and the closing table."""
    recipe: str | None = None
    """Where the recipe comes from; written down beside the run, and without effect on it."""

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "steps", "epochs", "eval_every"):
            self._check_count(name, minimum=1, optional=name != "global_batch_size")
        for name in ("seed", "compare_steps", "num_workers"):
            self._check_count(name, minimum=0, optional=False)
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"steps={self.steps} and epochs={self.epochs} both say how long to train; give one of them"
            )
        _check_choice("zero_stage", self.zero_stage, ("auto", *ZERO_STAGES))
        _check_choice("strategy", self.strategy, STRATEGIES)
        _check_choice("precision", self.precision, PRECISIONS)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be above 0, or None to clip nothing; got {self.max_grad_norm!r}")
        if self.memory_fractions is not None:
            object.__setattr__(self, "memory_fractions", _checked_fractions(self.memory_fractions))
        if self.emulate is not None:
            parse_cluster(self.emulate)
        self._check_batches()

    def _check_count(self, name: str, *, minimum: int, optional: bool) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigError(f"{name} must be an integer, {minimum} or more; got {value!r}")

    def _check_batches(self) -> None:
        if self.plan is not None and self.micro_batch_sizes is not None:
            raise ConfigError("plan and micro_batch_sizes both say what each rank runs; give one of them")
        if self.plan is not None and self.plan.global_batch_size != self.global_batch_size:
            raise ConfigError(
                f"the plan is for a global batch of {self.plan.global_batch_size}, global_batch_size is "
                f"{self.global_batch_size}; make a new plan, or leave the batch to the plan"
            )
        if self.plan is not None:
            # Their defaults say nothing, so that leaving them alone contradicts no plan.
            for name, default in (("zero_stage", "auto"), ("precision", "fp32"), ("strategy", "exact")):
                wanted, planned = getattr(self, name), getattr(self.plan, name)
                if wanted not in (default, planned):
                    raise ConfigError(
                        f"{name} is {wanted!r}, the plan was made for {planned!r}; leave it to the plan, or make a "
                        "new plan"
                    )
                if name != "strategy":  # a plan's may be "manual", which cannot be asked for
                    object.__setattr__(self, name, planned)
        if self.micro_batch_sizes is not None:
            # Read once, so that a wrong list is refused before any rank starts.
            object.__setattr__(self, "micro_batch_sizes", tuple(rows_by_rank(self.micro_batch_sizes)))
            self.given_plan()

    @property
    def profile_cache_dir(self) -> str | None:
        """Return the folder of earlier profiles, in ``POPLAR_CACHE_DIR`` or the user's cache; None where unused."""
        if not (self.reuse or self.refresh):
            return None
        default = os.path.join(os.path.expanduser("~"), ".cache", "poplar")
        return os.path.join(os.environ.get("POPLAR_CACHE_DIR") or default, "profiles")

    def given_plan(self) -> Plan | None:
        """Return the plan that the settings give; None where one is to be made."""
        if self.micro_batch_sizes is None:
            return self.plan
        return Plan.manual(
            self.micro_batch_sizes,
            global_batch_size=self.global_batch_size,
            zero_stage=0 if self.zero_stage == "auto" else self.zero_stage,
            precision=self.precision,
        )

    def check_world_size(self, world_size: int) -> None:
        """Refuse lists by rank that are not as long as there are ranks.

        Raises:
            PlanMismatchError: the plan or the batches are for another number of ranks.
            ConfigError: another number of emulated cards or memory shares.
        """
        if self.micro_batch_sizes is not None and len(self.micro_batch_sizes) != world_size:
            raise PlanMismatchError(
                f"micro_batch_sizes has {len(self.micro_batch_sizes)} entries, this run has {world_size} ranks; give "
                "one entry a rank"
            )
        if self.plan is not None:
            self.plan.check_cluster(world_size)
        if self.emulate is not None and len(parse_cluster(self.emulate)) != world_size:
            raise ConfigError(
                f"{self.emulate!r} names {len(parse_cluster(self.emulate))} cards, this run has {world_size} ranks; "
                "give one card a rank"
            )
        if self.memory_fractions is not None and len(self.memory_fractions) not in (1, world_size):
            raise ConfigError(
                f"memory_fractions has {len(self.memory_fractions)} entries, this run has {world_size} ranks; give one "
                "entry a rank, or one for all"
            )

    def memory_fraction(self, rank: int) -> float:
        """Return the share of its memory that ``rank`` may use."""
        if self.memory_fractions is None:
            return 1.0
        return self.memory_fractions[0] if len(self.memory_fractions) == 1 else self.memory_fractions[rank]

    def to_json(self, **more: Any) -> str:
        """Return the settings and ``more`` as JSON; the plan has a file of its own."""
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "plan"}
        return json.dumps({**more, **settings}, indent=1) + "\n"


def parse_micro_batch_sizes(text: str) -> tuple[tuple[int, ...], ...]:
    """Return the sizes by rank of "3,5" or "[24,12,16,24]"; "3+3,5" and "[[3,3],5]" give several micro-steps.

    Raises:
        ConfigError: not such a list.
    """
    try:
        entries = json.loads(text) if text.lstrip().startswith("[") else text.split(",")
        return tuple(_sizes(entry) for entry in entries)
    except (TypeError, ValueError):
        raise ConfigError(
            f"micro-batch sizes are one entry a rank, as '3,5' or '[24,12]', with '3+3,5' for several micro-steps; got "
            f"{text!r}"
        ) from None


def _sizes(entry: object) -> tuple[int, ...]:
    parts: Sequence[object] = (
        entry.split("+") if isinstance(entry, str) else entry if isinstance(entry, list) else [entry]
    )
    if any(isinstance(part, (bool, float)) for part in parts):
        raise ValueError(entry)
    return tuple(int(part) for part in parts)  # type: ignore[call-overload]


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if isinstance(value, bool) or value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, choices))}; got {value!r}")


def _checked_fractions(values: Sequence[float]) -> tuple[float, ...]:
    fractions = tuple(values)
    if not fractions or not all(isinstance(v, (int, float)) and math.isfinite(v) and 0 < v <= 1 for v in fractions):
        raise ConfigError(f"memory_fractions must be above 0 and at most 1; got {list(values)}")
    return tuple(float(value) for value in fractions)


def new_run_dir(parent: str | os.PathLike[str] = "runs") -> str:
    """Return a folder's name that says when the run began and does not exist yet."""
    stem = os.path.join(os.fspath(parent), time.strftime("%Y-%m-%d_%H-%M-%S"))
    number, name = 1, stem
    while os.path.exists(name):
        number, name = number + 1, f"{stem}_{number + 1}"
    return name
