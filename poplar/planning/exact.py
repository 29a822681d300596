"""The strategy "exact": the least predicted step time over all whole-number allocations.

[Note: why this is exact] Curves never decrease, so a batch can shrink without costing more, and both problems become
coverings: pieces that hold AT LEAST the samples, at the least cost, trimmed afterwards to exactly the samples.

Stages 0 and 1. T_k(n), the least time in which a rank of kind k does n samples by any mix of micro-batches, is the
covering of n with pieces (size s, seconds t_k(s)). A step lasts as long as its slowest rank, so the least t is sought
for which the largest n with T_k(n) <= t, summed over ranks, reaches the global batch.

Stages 2 and 3. All ranks wait for each other in every micro-step. One that lasts t holds the sum over ranks of the
largest batch within t, and no other t than the curves' own values needs looking at. A step is the covering of the
global batch with pieces (samples within t, t + collectives); the number of micro-steps falls out.

Ties: every micro-step is charged a trillionth of the cheapest piece, so that among equals the fewest win. Where even
parts cost no more than the pieces found, the parts are even, for less peak memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from poplar.plan import ClusterProfile
from poplar.planning.cost import Kind, Row

_TIE = 1e-12
"""Relative difference in seconds that counts as none."""


class Covering:
    """The least cost of covering 0 to ``num_samples`` samples with pieces that may be used any number of times."""

    def __init__(self, sizes: np.ndarray, costs: np.ndarray, num_samples: int):
        """Fill the table; takes len(sizes) x num_samples additions.

        Args:
            sizes: 1D, samples that a piece holds, increasing, from 1.
            costs: 1D, seconds of each piece, non-decreasing, above 0.
        """
        sizes, costs = sizes[::-1], costs[::-1]  # the first of equals is taken: the largest
        charged = costs + _TIE * costs[-1]
        reach = int(sizes[0])
        positions = reach - sizes
        dense = len(sizes) == reach
        # Entry reach + n is the cost of n samples; the zeros before it let a piece hold more than is left.
        padded = np.zeros(reach + num_samples + 1)
        chosen = np.zeros(num_samples + 1, dtype=np.intp)
        for n in range(1, num_samples + 1):
            before = padded[n : n + reach]
            candidates = (before if dense else before[positions]) + charged
            best = candidates.argmin()
            chosen[n] = best
            padded[reach + n] = candidates[best]
        self.least = padded[reach:]
        """1D, (num_samples + 1,): seconds by samples, non-decreasing, with the tie-break's charge."""
        self._chosen = sizes[chosen]

    def parts(self, num_samples: int, cost_of: Callable[[int], float]) -> list[int]:
        """Return parts, largest first, that add up to ``num_samples`` and cost the least; even if that costs no more.

        Args:
            cost_of: seconds of a part of the given size.
        """
        pieces = []
        left = num_samples
        while left > 0:
            pieces.append(int(self._chosen[left]))
            left -= pieces[-1]
        even = even_parts(num_samples, len(pieces))
        if math.fsum(map(cost_of, even)) <= math.fsum(map(cost_of, pieces)) * (1 + _TIE):
            return even
        return _trim(sorted(pieces, reverse=True), -left)


def even_parts(num_samples: int, num_parts: int) -> list[int]:
    """Cut ``num_samples`` into parts that differ by at most 1, larger ones first."""
    if num_parts == 0:
        return []
    quotient, remainder = divmod(num_samples, num_parts)
    return [quotient + 1] * remainder + [quotient] * (num_parts - remainder)


def _trim(pieces: list[int], surplus: int) -> list[int]:
    """Take ``surplus`` off the largest pieces, evenly. It is less than any piece, or that piece would not be there."""
    largest = pieces.count(pieces[0])
    cut = even_parts(surplus, largest)[::-1]
    return sorted([size - less for size, less in zip(pieces, cut, strict=False)] + pieces[largest:], reverse=True)


class Levels:
    """How many samples the ranks can do within a time, and who does which."""

    def __init__(self, levels: Sequence[np.ndarray], counts: Sequence[int]):
        """Merge the kinds' times.

        Args:
            levels: by kind, 1D: seconds for a rank to do n samples, non-decreasing, 0.0 at 0.
            counts: by kind: its number of ranks.
        """
        self._levels, self._counts = levels, counts
        values = np.concatenate([level[1:] for level in levels])
        weights = np.concatenate([np.full(len(level) - 1, count) for level, count in zip(levels, counts, strict=True)])
        order = np.argsort(values, kind="stable")
        values, totals = values[order], np.cumsum(weights[order])
        last_of_equals = np.append(values[1:] > values[:-1], True)
        self.thresholds = values[last_of_equals]
        """1D, increasing: the times at which some rank can do more."""
        self.capacities = totals[last_of_equals]
        """1D, increasing: samples that all ranks together can do within each threshold."""

    def threshold(self, num_samples: int) -> float:
        """Return the least time in which the ranks can do ``num_samples``."""
        return float(self.thresholds[np.searchsorted(self.capacities, num_samples)])

    def share_out(self, num_samples: int) -> list[list[int]]:
        """Share ``num_samples`` out within the least time; by kind, the samples of each of its ranks.

        All ranks first get what they can do in less than that time. What is left goes to the kinds that can do more
        in exactly that time, whoever can do most first: a slower card never gets more than a faster one of equal
        memory, and as few ranks as possible are the slowest.
        """
        time_s = self.threshold(num_samples)
        below = [int(np.searchsorted(level, time_s, side="left")) - 1 for level in self._levels]
        within = [int(np.searchsorted(level, time_s, side="right")) - 1 for level in self._levels]
        left = num_samples - sum(base * count for base, count in zip(below, self._counts, strict=True))
        more = [0] * len(below)

        def fastest_first(kind: int) -> tuple[int, float]:
            return -within[kind], self._levels[kind][: within[kind] + 1].sum()

        for kind in sorted(range(len(below)), key=fastest_first):
            more[kind] = min(left, (within[kind] - below[kind]) * self._counts[kind])
            left -= more[kind]
        return [
            [base + extra for extra in even_parts(total, count)]
            for base, total, count in zip(below, more, self._counts, strict=True)
        ]


def exact_rows(profile: ClusterProfile, kinds: Sequence[Kind], global_batch_size: int) -> list[Row]:
    """Return each rank's micro-batch sizes for the least predicted step time.

    Args:
        kinds: the ranks that may take samples, at least one; all others get none.
    """
    if profile.zero_stage <= 1:
        return _alone(kinds, global_batch_size, profile.world_size)
    return _together(kinds, global_batch_size, profile.world_size, profile.micro_step_collective_s)


def _alone(kinds: Sequence[Kind], global_batch_size: int, world_size: int) -> list[Row]:
    """Stages 0 and 1: each rank has micro-steps of its own."""
    counts = [len(kind.ranks) for kind in kinds]
    reach = [min(global_batch_size, 2 * -(-global_batch_size // sum(counts)))] * len(kinds)
    coverings: list[Covering] = [_covering(kind, samples) for kind, samples in zip(kinds, reach, strict=True)]
    while True:
        levels = Levels([covering.least for covering in coverings], counts)
        time_s = levels.threshold(global_batch_size)
        # A rank that could do its whole table within the time might do more: look further there.
        short = [
            k for k, samples in enumerate(reach) if coverings[k].least[-1] <= time_s and samples < global_batch_size
        ]
        if not short:
            break
        for k in short:
            reach[k] = min(global_batch_size, 2 * reach[k])
            coverings[k] = _covering(kinds[k], reach[k])
    rows: list[Row] = [()] * world_size
    for kind, covering, share in zip(kinds, coverings, levels.share_out(global_batch_size), strict=True):
        by_samples = {n: tuple(covering.parts(n, kind.seconds.__getitem__)) for n in set(share)}
        for rank, num_samples in zip(kind.ranks, share, strict=True):
            rows[rank] = by_samples[num_samples]
    return rows


def _covering(kind: Kind, num_samples: int) -> Covering:
    sizes = np.arange(1, min(kind.limit, num_samples) + 1)
    return Covering(sizes, kind.seconds[sizes], num_samples)


def _together(
    kinds: Sequence[Kind], global_batch_size: int, world_size: int, micro_step_collective_s: float
) -> list[Row]:
    """Stages 2 and 3: all ranks wait for the slowest in every micro-step."""
    levels = Levels([kind.seconds for kind in kinds], [len(kind.ranks) for kind in kinds])
    useful = int(np.searchsorted(levels.capacities, global_batch_size)) + 1
    samples = np.minimum(levels.capacities[:useful], global_batch_size)
    covering = Covering(samples, levels.thresholds[:useful] + micro_step_collective_s, global_batch_size)
    totals = covering.parts(global_batch_size, lambda total: levels.threshold(total) + micro_step_collective_s)
    return spread(world_size, kinds, levels, totals)


def spread(world_size: int, kinds: Sequence[Kind], levels: Levels, totals: Sequence[int]) -> list[Row]:
    """Share every micro-step's total out within its least time; ranks outside ``kinds`` get 0s."""
    rows: list[Row] = [(0,) * len(totals)] * world_size
    shares = {total: levels.share_out(total) for total in set(totals)}
    for k, kind in enumerate(kinds):
        for index, rank in enumerate(kind.ranks):
            rows[rank] = tuple(shares[total][k][index] for total in totals)
    return rows
