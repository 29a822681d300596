"""Predict the profile of cards that nobody has at hand: the ``ClusterProfile`` that measuring them would give.

    Cluster + ModelSpec + stage -> simulate_profile() -> ClusterProfile -> allocate() -> Plan

The profile is of the same type that the profiler measures, so that everything after it is the very same code.

[Note: a micro-step's compute]
seconds(b) = b x (3 x matmul FLOP / matmul rate + 3 x attention FLOP / attention rate + traffic / memory bandwidth)
             + parameters x bytes_per_parameter / memory bandwidth
The last term does not depend on b: it is what makes a large micro-batch cheaper by the sample, the saturating curve
b / seconds(b). Rates come from the catalogue. Activation checkpointing adds one forward (4 and 4/3 instead of 3 and 1).

[Note: memory]
Model state by stage for N parameters and a share r of them, with 16-bit compute in parentheses: parameters 4 (2) bytes,
gradients 4, Adam 8, float32 master weights none (4). Stage 1 cuts Adam and master weights, stage 2 gradients too, stage
3 parameters too. The peak adds the two largest units' gradients at stage 2; the root and four largest units' parameters
and two largest units' gradients at stage 3. Activations come on top, by the sample.

[Note: overlap]
Collectives of gradients hide behind the backward, those of stage 3's parameters behind both passes; what is left, and
at least the collective of one unit at the edge, counts. How much compute there is to hide behind depends on the plan,
which depends on the profile: ``simulator.py`` goes round twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from poplar.catalog import Card, find_card
from poplar.config import ZERO_STAGES
from poplar.errors import ConfigError, InfeasiblePlanError
from poplar.plan import ClusterProfile, RankProfile, check_shard_ratios
from poplar.simulation.interconnect import Interconnect, Ring
from poplar.simulation.model_spec import ModelSpec

OVERLAP_SHARE = 0.9
"""Assumed: share of the compute that collectives really hide behind."""
MEMORY_MARGIN = 0.05
"""Assumed: share of usable memory lost to fragmentation and buffers of collectives."""
ADAM_STEP_BYTES = 28
"""Memory traffic of a fused AdamW a parameter: four float32 values read, three written."""
MAX_MICRO_BATCH_SIZE = 4096
PRECISIONS = ("fp32", "fp16", "bf16", "auto")
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Cards, one a rank, and their wiring.

    Raises:
        ConfigError: no card, or an unknown one.
    """

    names: tuple[str, ...]
    link: Interconnect = field(default_factory=Interconnect)
    shard_ratios: tuple[float, ...] | None = None
    """Share of the model state by rank. None: equal."""

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigError("a cluster needs at least one card")
        for name in dict.fromkeys(self.names):
            find_card(name)
        if self.shard_ratios is not None:
            object.__setattr__(self, "shard_ratios", check_shard_ratios(self.shard_ratios, len(self.names)))

    @property
    def cards(self) -> tuple[Card, ...]:
        kinds = {name: find_card(name) for name in dict.fromkeys(self.names)}
        return tuple(kinds[name] for name in self.names)

    @property
    def shares(self) -> tuple[float, ...]:
        return self.shard_ratios or (1 / len(self.names),) * len(self.names)

    def ring(self) -> Ring:
        """Return the ring through all ranks."""
        bandwidth = self.link.ring_bytes_per_s(self.cards)
        return Ring(bytes_per_s=bandwidth, latency_s=self.link.latency_s, shares=self.shares)


def choose_precision(cards: Sequence[Card], precision: str) -> str:
    """Return the precision to simulate; "auto" takes bf16 where every card has it, else fp16, else fp32.

    Raises:
        ConfigError: a card does not have the type.
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    dtypes = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    if precision == "auto":
        return next(name for name, dtype in dtypes.items() if all(dtype in card.native_dtypes for card in cards))
    lacking = [card.name for card in cards if dtypes[precision] not in card.native_dtypes]
    if lacking:
        raise ConfigError(f"{lacking[0]} does not compute in {dtypes[precision]}; take another precision, or 'auto'")
    return precision


def compute_s(card: Card, spec: ModelSpec, micro_batch_size: int, precision: str, checkpointing: bool = False) -> float:
    """Return the seconds of one micro-step, forward and backward, without communication."""
    rates = card.rates(precision)
    passes = 4 if checkpointing else 3
    flop_s = spec.matmul_flop / (rates.matmul_tflops * 1e12)
    if rates.attention_tflops is not None:
        flop_s += spec.attention_flop / (rates.attention_tflops * 1e12)
    traffic_s = spec.traffic_bytes(precision) / card.memory_bandwidth_bytes_per_s
    fixed_s = spec.num_parameters * rates.bytes_per_parameter / card.memory_bandwidth_bytes_per_s
    return micro_batch_size * passes * (flop_s + traffic_s / 3) + fixed_s


def state_bytes(spec: ModelSpec, zero_stage: int, share: float, precision: str) -> int:
    """Return the bytes of model state that a rank with ``share`` of the shards holds between micro-steps, with Adam."""
    parts = _bytes_per_parameter(precision)
    whole, cut = sum(parts[: 3 - zero_stage]), sum(parts[3 - zero_stage :])
    return round(spec.num_parameters * (whole + cut * share))


def working_bytes(spec: ModelSpec, zero_stage: int, precision: str) -> int:
    """Return what stages 2 and 3 hold beyond the state at the peak: units that are whole for a while."""
    parameter, gradient, _ = _bytes_per_parameter(precision)
    if zero_stage < 2:
        return 0
    units = heapq.nlargest(4, spec.unit_parameters[1:]) or [0]
    gradients = gradient * sum(heapq.nlargest(2, spec.unit_parameters))
    return gradients + (parameter * (spec.unit_parameters[0] + sum(units)) if zero_stage == 3 else 0)


def simulate_profile(
    cluster: Cluster,
    spec: ModelSpec,
    zero_stage: int,
    *,
    precision: str = "auto",
    checkpointing: bool = False,
    micro_step_s: float | None = None,
) -> ClusterProfile:
    """Return the profile that measuring the cluster would give.

    Args:
        micro_step_s: compute of a micro-step's slowest rank, which collectives may hide behind. None: the least, over
            the ranks that compute, of a micro-step with the largest batch.

    Raises:
        InfeasiblePlanError: the model state does not fit a card, or no card can run a single sample; the message says
            which and how many GiB are missing.
    """
    if zero_stage not in ZERO_STAGES:
        raise ConfigError(f"zero_stage must be 0, 1, 2 or 3; got {zero_stage!r}")
    precision = choose_precision(cluster.cards, precision)
    kinds: dict[tuple[str, float], RankProfile] = {}
    for card, share in zip(cluster.cards, cluster.shares, strict=True):
        if (card.name, share) not in kinds:
            kinds[card.name, share] = _rank_profile(card, spec, zero_stage, share, precision, checkpointing)
    ranks = tuple(kinds[card.name, share] for card, share in zip(cluster.cards, cluster.shares, strict=True))
    if not any(rank.max_micro_batch_size for rank in ranks):
        raise InfeasiblePlanError(_too_small(cluster, spec, zero_stage, precision, checkpointing))
    if micro_step_s is None:
        micro_step_s = min(rank.points[-1][1] for rank in ranks if rank.points)
    micro, step = _exposed_collectives(cluster.ring(), spec, zero_stage, precision, micro_step_s)
    return ClusterProfile(
        zero_stage=zero_stage,
        ranks=ranks,
        micro_step_collective_s=micro,
        step_collective_s=step,
        precision=precision,
        shard_ratios=cluster.shard_ratios,
    )


def _bytes_per_parameter(precision: str) -> tuple[int, int, int]:
    """Return the bytes of a parameter, of its gradient, and of what the optimizer holds for it."""
    return (4, 4, 8) if precision == "fp32" else (2, 4, 12)


def _rank_profile(
    card: Card, spec: ModelSpec, zero_stage: int, share: float, precision: str, checkpointing: bool
) -> RankProfile:
    held = state_bytes(spec, zero_stage, share, precision)
    limit = int(card.usable_memory_bytes * (1 - MEMORY_MARGIN))
    if held > limit:
        raise InfeasiblePlanError(
            f"{spec.name} at stage {zero_stage} needs {held / _GIB:.1f} GiB of model state on each {card.name}, which "
            f"has {limit / _GIB:.1f}: {(held - limit) / _GIB:.1f} GiB are missing; take a higher stage or more cards"
        )
    base = held + working_bytes(spec, zero_stage, precision)
    sample = max(1.0, spec.activation_bytes(precision, checkpointing))
    maximum = min(MAX_MICRO_BATCH_SIZE, max(0, int((limit - base) / sample)))
    sizes = sorted({size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048) if size < maximum} | {maximum})
    sizes = [size for size in sizes if size > 0]
    own_parameters = spec.num_parameters * (share if zero_stage else 1.0)
    return RankProfile(
        device=card.name,
        points=tuple((size, compute_s(card, spec, size, precision, checkpointing)) for size in sizes),
        max_micro_batch_size=maximum,
        optimizer_step_s=own_parameters * ADAM_STEP_BYTES / card.memory_bandwidth_bytes_per_s,
        memory_points=tuple((size, round(base + size * sample)) for size in sizes),
        state_bytes=held,
        memory_limit_bytes=limit,
    )


def _too_small(cluster: Cluster, spec: ModelSpec, zero_stage: int, precision: str, checkpointing: bool) -> str:
    """Say how far the roomiest rank is from running one sample."""
    sample = spec.activation_bytes(precision, checkpointing) + working_bytes(spec, zero_stage, precision)
    room, card = max(
        (
            (
                card.usable_memory_bytes * (1 - MEMORY_MARGIN) - state_bytes(spec, zero_stage, share, precision),
                card.name,
            )
            for card, share in zip(cluster.cards, cluster.shares, strict=True)
        )
    )
    hint = "" if checkpointing else ", or activation checkpointing"
    return (
        f"{spec.name} at stage {zero_stage}: no card can run one sample of {spec.tokens_per_sample} tokens; the {card} "
        f"lacks {(sample - room) / _GIB:.1f} GiB; take a higher stage, a shorter sequence{hint}"
    )


def _exposed_collectives(
    ring: Ring, spec: ModelSpec, zero_stage: int, precision: str, micro_step_s: float
) -> tuple[float, float]:
    """Return the seconds of collectives that compute does not hide: of a micro-step, and of a step."""
    if len(ring.shares) == 1:
        return 0.0, 0.0
    wire = 4 if precision == "fp32" else 2
    sizes = [wire * count for count in spec.unit_parameters]
    forward_s, backward_s = (OVERLAP_SHARE * share * micro_step_s for share in (1 / 3, 2 / 3))
    edge_s = ring.shard_s(max(sizes))
    total_s = sum(map(ring.shard_s, sizes))
    agree_s = 2 * ring.latency_s * (len(ring.shares) - 1)
    if zero_stage == 0:
        reduce_s = sum(map(ring.all_reduce_s, sizes))
        return 0.0, agree_s + max(ring.all_reduce_s(sizes[0]), reduce_s - backward_s)
    reduce_left_s = max(ring.shard_s(sizes[0]), total_s - backward_s)
    if zero_stage == 1:
        return 0.0, agree_s + reduce_left_s + total_s
    if zero_stage == 2:
        return reduce_left_s, agree_s + total_s
    return max(edge_s, total_s - forward_s) + max(edge_s, 2 * total_s - backward_s), agree_s
