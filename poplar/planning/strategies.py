"""The rivals of "exact": the paper's search, and how two other systems share a batch out.

"equal"   DeepSpeed: the same micro-batch on every rank, so that the smallest card limits all.
"flops"   Whale (arXiv:2011.09208): by datasheet rating, within memory.
"poplar"  the paper's (arXiv:2408.12596), as public summaries tell it; where they leave room, "our reading" marks it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from poplar.errors import InfeasiblePlanError
from poplar.plan import ClusterProfile
from poplar.planning.cost import Kind, Row, predict
from poplar.planning.exact import Levels, even_parts, spread

_MORE_STEPS = 1.25
"""Growth of the number of micro-steps from one try of "flops" to the next."""


def proportional(total: int, weights: np.ndarray) -> np.ndarray:
    """Cut ``total`` into whole shares as ``weights`` are: largest remainders first, of equal ones the first."""
    exact = total * weights / weights.sum()
    shares = np.floor(exact).astype(int)
    order = np.argsort(shares - exact, kind="stable")
    shares[order[: total - shares.sum()]] += 1
    return shares


def proportional_within(total: int, weights: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Cut ``total`` as ``weights`` are, none above its limit; what is too much for one is shared by the others.

    Args:
        limits: whole numbers that add up to at least ``total``.
    """
    shares = np.zeros(len(weights), dtype=int)
    open_ranks = limits > 0
    while total > 0:
        wanted = proportional(total, np.where(open_ranks, weights, 0.0))
        full = open_ranks & (wanted >= limits)
        if not full.any():
            return shares + wanted
        shares[full] = limits[full]
        open_ranks &= ~full
        total -= int(limits[full].sum())
    return shares


def poplar_rows(profile: ClusterProfile, kinds: Sequence[Kind], global_batch_size: int) -> list[Row]:
    """Share the batch out as the paper does.

    Stages 0 and 1: in proportion to each card's peak speed, in micro-batches of the size that reaches it; the last one
    is what is left (our reading). Stages 2 and 3: scan the time t of a micro-step, give each rank the largest batch it
    finishes within t, and take the t for which (number of micro-steps) x (t + collectives) is least. The last
    micro-step, if smaller, is shared out within the least time (our reading).
    """
    rows: list[Row] = [()] * profile.world_size
    if profile.zero_stage <= 1:
        speeds, sizes = np.zeros(profile.world_size), [1] * profile.world_size
        for kind in kinds:
            by_size = np.arange(1, kind.limit + 1) / kind.seconds[1:]
            for rank in kind.ranks:
                speeds[rank], sizes[rank] = by_size.max(), int(by_size.argmax()) + 1
        for rank, share in enumerate(proportional(global_batch_size, speeds).tolist()):
            num_full, rest = divmod(share, sizes[rank])
            rows[rank] = (sizes[rank],) * num_full + (rest,) * (rest > 0)
        return rows
    levels = Levels([kind.seconds for kind in kinds], [len(kind.ranks) for kind in kinds])
    num_micro_steps = -(-global_batch_size // levels.capacities)
    best = int(np.argmin(num_micro_steps * (levels.thresholds + profile.micro_step_collective_s)))
    capacity = int(levels.capacities[best])
    totals = [min(capacity, global_batch_size - done) for done in range(0, global_batch_size, capacity)]
    return spread(profile.world_size, kinds, levels, totals)


def equal_rows(profile: ClusterProfile, kinds: Sequence[Kind], global_batch_size: int) -> list[Row]:
    """Give every rank the same micro-batches, of the size with the least predicted step time.

    A global batch that the ranks do not divide ends in a smaller micro-step, where faster ranks get one sample more.

    Raises:
        InfeasiblePlanError: a rank can take no samples at all.
    """
    world_size = profile.world_size
    with_samples = {rank for kind in kinds for rank in kind.ranks}
    if len(with_samples) < world_size:
        rank = min(set(range(world_size)) - with_samples)
        raise InfeasiblePlanError(
            f"strategy equal gives every rank the same micro-batch, but rank {rank} ({profile.ranks[rank].device}) can "
            f"take no samples at stage {profile.zero_stage}; use strategy exact, or leave the rank out"
        )
    sizes = np.arange(1, min(kind.limit for kind in kinds) + 1)
    kinds = sorted(kinds, key=lambda kind: kind.seconds[sizes].sum())
    # Of each kind, how many ranks come before it when the samples that are left over are dealt out.
    before = np.cumsum([[0], *([len(kind.ranks)] for kind in kinds[:-1])], axis=0)
    num_full, rest = np.divmod(global_batch_size, sizes * world_size)
    smaller, num_larger = np.divmod(rest, world_size)
    full_s = np.array([kind.seconds[sizes] for kind in kinds])
    last_s = np.array([kind.seconds[last] for kind, last in zip(kinds, smaller + (before < num_larger), strict=True)])
    if profile.zero_stage <= 1:
        step_s = (num_full * full_s + last_s).max(axis=0)
    else:
        step_s = num_full * full_s.max(axis=0) + last_s.max(axis=0)
        step_s = step_s + (num_full + (rest > 0)) * profile.micro_step_collective_s
    # Of equal times the largest micro-batch, with the fewest micro-steps.
    best = len(sizes) - 1 - int(np.argmin(step_s[::-1]))
    full = (int(sizes[best]),) * int(num_full[best])
    rows: list[Row] = [()] * world_size
    in_order = [rank for kind in kinds for rank in kind.ranks]
    for rank, part in zip(in_order, even_parts(int(rest[best]), world_size), strict=True):
        rows[rank] = full + ((part,) if rest[best] else ())
    return rows


def flops_rows(
    profile: ClusterProfile, kinds: Sequence[Kind], global_batch_size: int, ratings: Sequence[float]
) -> list[Row]:
    """Give each rank a part of every micro-step in proportion to its rating, at most what its memory holds.

    All ranks have the same number of micro-steps: the least that memory allows, or more where that is predicted to be
    faster, as when a fast card's memory keeps it from its part.

    Args:
        ratings: peak arithmetic rate by rank, in any unit.
    """
    limits = np.zeros(profile.world_size, dtype=int)
    for kind in kinds:
        limits[list(kind.ranks)] = kind.limit
    weights = np.asarray(ratings, dtype=float)
    best: tuple[float, list[Row]] | None = None
    num_micro_steps = -(-global_batch_size // int(limits.sum()))
    while best is None or num_micro_steps <= global_batch_size:
        totals = even_parts(global_batch_size, num_micro_steps)
        shares = {total: proportional_within(total, weights, limits).tolist() for total in set(totals)}
        rows = [tuple(shares[total][rank] for total in totals) for rank in range(profile.world_size)]
        step_s = predict(profile, rows).step_s
        if best is not None and step_s >= best[0]:
            # More micro-steps helped as long as memory kept fast cards from their part; now they cost.
            break
        best = (step_s, rows)
        num_micro_steps = max(num_micro_steps + 1, int(num_micro_steps * _MORE_STEPS))
    return best[1]
