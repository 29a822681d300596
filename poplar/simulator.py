"""Simulate training on cards that are not at hand: every stage and strategy, planned by the allocator itself.

    Cluster, ModelSpec -> simulate_profile() -> allocate() -> compute to hide collectives behind -> once more
                       -> SimulatedRun

A run's prediction is its plan's own. Where the seconds between two plans go is read off their predictions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from poplar.allocator import allocate
from poplar.config import STRATEGIES, ZERO_STAGES
from poplar.errors import ConfigError, InfeasiblePlanError
from poplar.plan import ClusterProfile, Plan, Prediction
from poplar.simulation.model_spec import ModelSpec
from poplar.simulation.step_model import Cluster, choose_precision, simulate_profile

MAX_GLOBAL_BATCH_SIZE = 10**7
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """One cluster, stage and strategy."""

    cluster: Cluster
    spec: ModelSpec
    zero_stage: int
    strategy: str
    profile: ClusterProfile | None = None
    plan: Plan | None = None
    """None: it does not fit."""
    problem: str = ""
    """Why it does not fit."""

    @property
    def prediction(self) -> Prediction | None:
        return self.plan.predicted if self.plan is not None else None

    @property
    def samples_per_s(self) -> float:
        """Return the throughput; 0 where the run does not fit."""
        if self.plan is None or self.plan.predicted is None:
            return 0.0
        return self.plan.global_batch_size / self.plan.predicted.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.samples_per_s * self.spec.tokens_per_sample

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain values, with the ranks' micro-batches by kind of card."""
        result: dict[str, Any] = {
            "cluster": _counted(self.cluster.names),
            "model": self.spec.name,
            "zero_stage": self.zero_stage,
            "strategy": self.strategy,
        }
        if self.plan is None or self.plan.predicted is None:
            return {**result, "fits": False, "problem": self.problem}
        predicted = self.plan.predicted
        return {
            **result,
            "fits": True,
            "precision": self.plan.precision,
            "global_batch_size": self.plan.global_batch_size,
            "step_s": predicted.step_s,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "collective_s": predicted.collective_s,
            "idle_share": mean_idle_s(predicted) / predicted.step_s,
            "gradient_accumulation_steps": self.plan.gradient_accumulation_steps,
            "micro_batch_sizes": {row.device: list(row.micro_batch_sizes) for row in self.plan.ranks},
            "notes": list(self.plan.notes),
        }


@dataclass(frozen=True, kw_only=True)
class GainParts:
    """Where the seconds go that one plan saves over another, in seconds of the slower plan's step; they add up."""

    balance_s: float
    """Less waiting, on average over the ranks."""
    collective_s: float
    """Less communication that compute does not hide: fewer micro-steps, or longer ones to hide behind."""
    compute_s: float
    """Less compute on average over the ranks: larger micro-batches, or samples on faster cards."""

    def leading(self) -> str:
        """Return the name of the largest part."""
        parts = {"balance": self.balance_s, "fewer or better hidden collectives": self.collective_s}
        parts["larger micro-batches or faster cards"] = self.compute_s
        return max(parts, key=lambda name: parts[name])


def simulate(
    cluster: Cluster,
    spec: ModelSpec,
    global_batch_size: int,
    *,
    zero_stages: Sequence[int] = ZERO_STAGES,
    strategies: Sequence[str] = STRATEGIES,
    precision: str = "auto",
    checkpointing: bool = False,
) -> tuple[SimulatedRun, ...]:
    """Simulate every stage with every strategy; what does not fit says why, instead of raising.

    Raises:
        ConfigError: an argument is wrong.
    """
    if not 1 <= global_batch_size <= MAX_GLOBAL_BATCH_SIZE:
        raise ConfigError(
            f"a global batch of 1 to {MAX_GLOBAL_BATCH_SIZE} samples can be simulated; got {global_batch_size}"
        )
    unknown = [strategy for strategy in strategies if strategy not in STRATEGIES]
    if unknown:
        raise ConfigError(f"strategy must be one of {', '.join(STRATEGIES)}; got {unknown[0]!r}")
    precision = choose_precision(cluster.cards, precision)
    runs = []
    for stage in zero_stages:
        settings: dict[str, Any] = {"precision": precision, "checkpointing": checkpointing}
        try:
            first = simulate_profile(cluster, spec, stage, **settings)
        except InfeasiblePlanError as error:
            for strategy in strategies:
                run = SimulatedRun(cluster=cluster, spec=spec, zero_stage=stage, strategy=strategy, problem=str(error))
                runs.append(run)
            continue
        for strategy in strategies:
            runs.append(_simulate_strategy(first, cluster, spec, strategy, global_batch_size, settings))
    return tuple(runs)


def _simulate_strategy(
    first: ClusterProfile,
    cluster: Cluster,
    spec: ModelSpec,
    strategy: str,
    global_batch_size: int,
    settings: dict[str, Any],
) -> SimulatedRun:
    run = SimulatedRun(cluster=cluster, spec=spec, zero_stage=first.zero_stage, strategy=strategy)
    try:
        guess = allocate(first, global_batch_size, strategy)
        profile = simulate_profile(
            cluster, spec, first.zero_stage, micro_step_s=_micro_step_s(guess, first), **settings
        )
        return replace(run, profile=profile, plan=allocate(profile, global_batch_size, strategy))
    except InfeasiblePlanError as error:
        return replace(run, problem=str(error))


def _micro_step_s(plan: Plan, profile: ClusterProfile) -> float:
    """Return the compute of an average micro-step, its slowest rank's."""
    assert plan.predicted is not None
    slowest_s = plan.predicted.compute_s[0] + plan.predicted.idle_s[0] - max(r.optimizer_step_s for r in profile.ranks)
    return max(0.0, slowest_s) / plan.gradient_accumulation_steps


def best_run(runs: Sequence[SimulatedRun], strategy: str | None = None) -> SimulatedRun | None:
    """Return the fastest of the runs that fit, of equal ones the first; None if none fits."""
    fitting = [run for run in runs if run.plan is not None and strategy in (None, run.strategy)]
    return max(fitting, key=lambda run: run.samples_per_s, default=None)


def gain_parts(slower: Prediction, faster: Prediction) -> GainParts:
    """Split the difference of two steps of the same batch over the same ranks."""
    balance_s = mean_idle_s(slower) - mean_idle_s(faster)
    collective_s = slower.collective_s - faster.collective_s
    return GainParts(
        balance_s=balance_s,
        collective_s=collective_s,
        compute_s=slower.step_s - faster.step_s - balance_s - collective_s,
    )


def mean_idle_s(prediction: Prediction) -> float:
    """Return the seconds of waiting in a step, on average over the ranks."""
    return sum(prediction.idle_s) / len(prediction.idle_s)


def split_by_speed(cluster: Cluster) -> tuple[Cluster, Cluster] | None:
    """Return the cluster of its weakest kind of card alone and that of its strongest; None if all are of one kind."""
    if cluster.shard_ratios is not None or len(set(cluster.names)) < 2:
        return None
    speeds = {card.name: card.relative_speed for card in cluster.cards}
    weak, strong = min(speeds, key=lambda name: speeds[name]), max(speeds, key=lambda name: speeds[name])
    return (
        replace(cluster, names=tuple(name for name in cluster.names if name == weak)),
        replace(cluster, names=tuple(name for name in cluster.names if name == strong)),
    )


def parse_tokens(text: str) -> int:
    """Return the number of "2M" (two million), "2Mi" (2 x 2^20), "512k" or "1000".

    Raises:
        ConfigError: not such a number, or below 1.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([kmg]i?)?", text.strip().lower())
    number = round(float(match[1]) * _SUFFIXES[match[2] or ""]) if match else 0
    if number < 1:
        raise ConfigError(f"tokens must be a number from 1, as '2M', '512k' or '4096'; got {text!r}")
    return number


def batch_of_tokens(tokens: int, spec: ModelSpec) -> int:
    """Return the nearest number of samples to ``tokens``, at least 1."""
    return max(1, round(tokens / spec.tokens_per_sample))


def describe_cluster(names: Sequence[str]) -> str:
    """Return the cards with their counts, as ``parse_cluster`` reads them."""
    return ",".join(f"{name}:{count}" for name, count in _counted(names).items())


def _counted(names: Sequence[str]) -> dict[str, int]:
    return {name: list(names).count(name) for name in dict.fromkeys(names)}
