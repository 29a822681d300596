"""Advise on a cluster: which stage, what each kind of card adds, what binds, what one card more would bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from poplar.catalog import find_card
from poplar.errors import InfeasiblePlanError
from poplar.simulation.model_spec import ModelSpec
from poplar.simulation.step_model import Cluster, compute_s
from poplar.simulator import SimulatedRun, best_run, describe_cluster, mean_idle_s, simulate

NETWORK_BINDS, IDLE_BINDS, MEMORY_BINDS = 0.15, 0.15, 0.9
"""What is said to bind: collectives, idling above these shares of a step; speed at the largest batch below this."""


@dataclass(frozen=True, kw_only=True)
class KindAdvice:
    """What one kind of card does for the cluster."""

    name: str
    count: int
    tokens_per_s_without: float
    """Of the cluster without all cards of the kind; 0 where the model then does not fit."""
    tokens_per_s_with_one_more: float
    largest_micro_batch_size: int
    speed_at_largest: float
    """Speed by the sample at the largest micro-batch that fits, as a share of what ever larger ones approach."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The best stage of a cluster, and what would change it."""

    best: SimulatedRun
    by_stage: tuple[SimulatedRun, ...]
    kinds: tuple[KindAdvice, ...]
    considered: tuple[tuple[str, float], ...]
    """(card that is not in the cluster yet, tokens/s with one of it)."""

    @property
    def binds(self) -> tuple[str, ...]:
        """Return what holds the best run back, in sentences; "compute" alone where nothing else does."""
        assert self.best.prediction is not None
        predicted, found = self.best.prediction, []
        network = predicted.collective_s / predicted.step_s
        if network > NETWORK_BINDS:
            found.append(f"network: {network:.0%} of a step is communication that compute does not hide")
        for kind in self.kinds:
            if kind.largest_micro_batch_size == 0:
                found.append(f"memory: not one sample fits on a {kind.name}; it only holds shards")
            elif kind.speed_at_largest < MEMORY_BINDS:
                found.append(
                    f"memory: a {kind.name} fits {kind.largest_micro_batch_size} samples and reaches "
                    f"{kind.speed_at_largest:.0%} of its best speed with them"
                )
        idle = mean_idle_s(predicted) / predicted.step_s
        if idle > IDLE_BINDS:
            found.append(f"batch: ranks wait {idle:.0%} of a step; a larger global batch can be shared more evenly")
        return tuple(found) or ("compute: nothing else holds the cluster back",)

    def to_dict(self) -> dict[str, Any]:
        return {
            "best": self.best.to_dict(),
            "by_stage": [run.to_dict() for run in self.by_stage],
            "binds": list(self.binds),
            "kinds": [vars(kind) for kind in self.kinds],
            "considered": [{"card": name, "tokens_per_s": speed} for name, speed in self.considered],
        }


def advise(
    cluster: Cluster, spec: ModelSpec, global_batch_size: int, *, consider: Sequence[str] = (), **settings: Any
) -> Advice:
    """Simulate the cluster at every stage with the strategy "exact", then with cards taken away and added.

    Args:
        consider: cards that are not in the cluster yet.
        settings: ``precision``, ``checkpointing``.

    Raises:
        InfeasiblePlanError: the model fits at no stage; the message says for each stage why.
    """
    by_stage = simulate(cluster, spec, global_batch_size, strategies=("exact",), **settings)
    best = best_run(by_stage)
    if best is None or best.profile is None:
        lines = "; ".join(f"stage {run.zero_stage}: {run.problem}" for run in by_stage)
        raise InfeasiblePlanError(f"{spec.name} fits at no stage on {describe_cluster(cluster.names)}: {lines}")

    def tokens_per_s(names: Sequence[str]) -> float:
        if not names:
            return 0.0
        changed = replace(cluster, names=tuple(names), shard_ratios=None)
        run = best_run(simulate(changed, spec, global_batch_size, strategies=("exact",), **settings))
        return run.tokens_per_s if run is not None else 0.0

    kinds = []
    for name in dict.fromkeys(cluster.names):
        rank = best.profile.ranks[cluster.names.index(name)]
        kinds.append(
            KindAdvice(
                name=name,
                count=cluster.names.count(name),
                tokens_per_s_without=tokens_per_s([other for other in cluster.names if other != name]),
                tokens_per_s_with_one_more=tokens_per_s(_with_one_more(cluster.names, name)),
                largest_micro_batch_size=rank.max_micro_batch_size,
                speed_at_largest=_speed_at(best, name, rank.max_micro_batch_size),
            )
        )
    added = [find_card(name).name for name in consider]
    considered = tuple((name, tokens_per_s(_with_one_more(cluster.names, name))) for name in dict.fromkeys(added))
    return Advice(best=best, by_stage=by_stage, kinds=tuple(kinds), considered=considered)


def _with_one_more(names: Sequence[str], name: str) -> list[str]:
    """Put the card beside its like, so that it joins their node."""
    position = max((index + 1 for index, other in enumerate(names) if other == name), default=len(names))
    return [*names[:position], name, *names[position:]]


def _speed_at(run: SimulatedRun, name: str, micro_batch_size: int) -> float:
    """Return the speed by the sample as a share of what it tends to as micro-batches grow."""
    if micro_batch_size == 0 or run.profile is None:
        return 0.0
    card, precision = find_card(name), run.profile.precision
    one_s, two_s, own_s = (compute_s(card, run.spec, size, precision) for size in (1, 2, micro_batch_size))
    return micro_batch_size * (two_s - one_s) / own_s
