"""The records that travel through Poplar: what was measured (profile), and what was chosen (plan).

Both are plain, frozen, and can be built by hand from numbers. Both are stored as JSON with a version. No torch here.

    RankProfile -> ClusterProfile -> allocate() -> Plan(RankPlan, Prediction) -> loader, engine
"""

from __future__ import annotations

import hashlib
import math
import operator
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from poplar.config import ZERO_STAGES
from poplar.errors import ConfigError, PlanMismatchError
from poplar.json_records import build_record, dump_record, parse_record

PLAN_VERSION = 1
PROFILE_VERSION = 1


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_seconds(name: str, value: float) -> None:
    _check(
        isinstance(value, (int, float)) and math.isfinite(value) and value >= 0,
        f"{name} must be a finite number of seconds, 0 or more; got {value!r}",
    )


def _check_zero_stage(zero_stage: object) -> None:
    _check(zero_stage in ZERO_STAGES and _is_int(zero_stage), f"zero_stage must be 0, 1, 2 or 3; got {zero_stage!r}")


LARGEST_SIZE = 2**24
"""Of a micro-batch in a profile: planning makes a list of the seconds of every size."""


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """What one rank measured of itself at one ZeRO stage, with nobody to wait for."""

    device: str
    """Catalogue name of the card, as "t4-16g". An unknown name matters to the strategy "flops" alone."""
    points: tuple[tuple[int, float], ...]
    """(micro_batch_size, compute seconds of one micro-step), sizes increasing. Empty: a card that only holds shards."""
    max_micro_batch_size: int
    """The largest micro-batch that trained within memory; 0 with empty ``points``."""
    device_id: str | None = None
    """Identity of the card (its UUID). Checked against the card at hand only where it is set."""
    optimizer_step_s: float = 0.0
    """Seconds of the optimizer's step on this rank's shard."""
    memory_points: tuple[tuple[int, int], ...] = ()
    """(micro_batch_size, peak bytes of a step)."""
    point_spreads: tuple[tuple[int, float], ...] = ()
    """(micro_batch_size, spread): by how much repeated measurements of a point disagree, as a share of it."""
    state_bytes: int | None = None
    """Bytes of model state (parameters, gradients, optimizer) that this rank holds between micro-steps."""
    memory_limit_bytes: int | None = None
    """Bytes that this rank may use."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple((size, float(seconds)) for size, seconds in self.points))
        object.__setattr__(self, "memory_points", tuple((size, peak) for size, peak in self.memory_points))
        object.__setattr__(self, "point_spreads", tuple((size, float(spread)) for size, spread in self.point_spreads))
        maximum = self.max_micro_batch_size
        _check(
            _is_int(maximum) and 0 <= maximum <= LARGEST_SIZE,
            f"max_micro_batch_size must be an integer from 0 to {LARGEST_SIZE}; got {maximum!r} ({self.device})",
        )
        sizes = [size for size, _ in self.points]
        _check(
            all(_is_int(size) and 1 <= size <= LARGEST_SIZE for size in sizes) and sizes == sorted(set(sizes)),
            f"points must have increasing integer sizes from 1 to {LARGEST_SIZE}; got sizes {sizes} ({self.device})",
        )
        for size, peak in self.memory_points:
            _check(
                _is_int(size) and size >= 1 and _is_int(peak) and peak >= 0,
                f"memory_points must have sizes from 1 and whole bytes; got {(size, peak)!r} ({self.device})",
            )
        for size, spread in self.point_spreads:
            _check(
                math.isfinite(spread) and spread >= 0,
                f"point_spreads must be finite, 0 or more; got {spread!r} at size {size} ({self.device})",
            )
        for size, seconds in self.points:
            _check(
                math.isfinite(seconds) and seconds > 0,
                f"points must have finite seconds above 0; got {seconds!r} at size {size} ({self.device})",
            )
        _check(
            bool(sizes) == (maximum > 0),
            f"max_micro_batch_size {maximum} with {len(sizes)} points ({self.device}): a card that computes needs "
            "both, a card that only holds shards has neither",
        )
        _check_seconds("optimizer_step_s", self.optimizer_step_s)

    def scaled(self, factor: float) -> RankProfile:
        """Return this profile with every time ``factor`` times as long."""
        return replace(
            self,
            points=tuple((size, seconds * factor) for size, seconds in self.points),
            optimizer_step_s=self.optimizer_step_s * factor,
        )


@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """The profiles of all ranks at one ZeRO stage, and the collectives' part of a step.

    A step costs, at stages 0 and 1, the largest rank's sum of its micro-steps; at stages 2 and 3, the sum over
    micro-steps of the slowest rank plus ``micro_step_collective_s``; then ``step_collective_s`` and the largest
    ``optimizer_step_s``.
    """

    zero_stage: int
    ranks: tuple[RankProfile, ...]
    micro_step_collective_s: float = 0.0
    """Seconds of a micro-step's collectives that compute does not hide (stages 2 and 3)."""
    step_collective_s: float = 0.0
    """Seconds of a step's collectives that compute does not hide."""
    precision: str = "fp32"
    """Precision that was profiled."""
    shard_ratios: tuple[float, ...] | None = None
    """Share of the model state held by each rank. None: equal."""
    sharded_state_bytes: int | None = None
    """Bytes of model state that this stage cuts into shards, summed over ranks; for ``suggest_shard_ratios``."""
    notes: tuple[str, ...] = ()
    """What the profiler wants said: a card where nothing fits, times that disagree."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        object.__setattr__(self, "notes", tuple(self.notes))
        _check_zero_stage(self.zero_stage)
        _check(len(self.ranks) > 0, "ranks must hold at least one RankProfile")
        _check_seconds("micro_step_collective_s", self.micro_step_collective_s)
        _check_seconds("step_collective_s", self.step_collective_s)
        if self.shard_ratios is not None:
            object.__setattr__(self, "shard_ratios", check_shard_ratios(self.shard_ratios, len(self.ranks)))

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def scaled(self, factor: float) -> ClusterProfile:
        """Return this profile with every time ``factor`` times as long."""
        return replace(
            self,
            ranks=tuple(rank.scaled(factor) for rank in self.ranks),
            micro_step_collective_s=self.micro_step_collective_s * factor,
            step_collective_s=self.step_collective_s * factor,
        )

    def with_collectives(self, micro_step_collective_s: float, step_collective_s: float) -> ClusterProfile:
        """Return this profile with other seconds of collectives."""
        return replace(self, micro_step_collective_s=micro_step_collective_s, step_collective_s=step_collective_s)

    def to_json(self) -> str:
        return dump_record("profile", PROFILE_VERSION, self)

    @classmethod
    def from_json(cls, text: str) -> ClusterProfile:
        """Read what ``to_json`` wrote.

        Raises:
            ConfigError: not JSON, not a profile, or of a version this release does not read.
        """
        data = parse_record("profile", PROFILE_VERSION, text)
        data["ranks"] = tuple(build_record(RankProfile, rank) for rank in _listed(data, "ranks"))
        return build_record(cls, data)


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What one rank does in a step."""

    micro_batch_sizes: tuple[int, ...]
    """Samples of every micro-step, in order. At stages 2 and 3 as many on every rank, some may be 0."""
    device: str = ""
    device_id: str | None = None
    """Identity of the card this row was made for; checked only where it is set."""

    def __post_init__(self) -> None:
        sizes = tuple(self.micro_batch_sizes)
        object.__setattr__(self, "micro_batch_sizes", sizes)
        _check(
            all(_is_int(size) and size >= 0 for size in sizes),
            f"micro_batch_sizes must be integers, 0 or more; got {list(sizes)}",
        )

    @property
    def num_samples(self) -> int:
        """Samples of this rank in one step."""
        return sum(self.micro_batch_sizes)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted seconds of one step and their parts."""

    step_s: float
    compute_s: tuple[float, ...] = ()
    """By rank: forward and backward of its micro-steps, and its optimizer step."""
    idle_s: tuple[float, ...] = ()
    """By rank: waiting for slower ranks."""
    collective_s: float = 0.0
    """Collectives that compute does not hide."""
    peak_memory_bytes: tuple[int | None, ...] = ()
    """By rank, where the profile measured memory."""

    def __post_init__(self) -> None:
        for name in ("compute_s", "idle_s", "peak_memory_bytes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Each rank's micro-batches, with the stage, precision and shards they were made for.

    Raises:
        ConfigError: the sizes do not add up to ``global_batch_size``, or stages 2 and 3 with unequal micro-steps.
    """

    zero_stage: int
    global_batch_size: int
    ranks: tuple[RankPlan, ...]
    strategy: str = "manual"
    predicted: Prediction | None = None
    precision: str = "fp32"
    shard_ratios: tuple[float, ...] | None = None
    notes: tuple[str, ...] = ()
    """What the allocator wants said: a card given nothing, a smoothed curve, a stage that did not fit."""

    def __post_init__(self) -> None:
        # Equal rows share one tuple, so that a plan for a thousand ranks of a few kinds stays small.
        shared: dict[tuple[int, ...], tuple[int, ...]] = {}
        ranks = tuple(self.ranks)
        for rank in ranks:
            object.__setattr__(
                rank, "micro_batch_sizes", shared.setdefault(rank.micro_batch_sizes, rank.micro_batch_sizes)
            )
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "notes", tuple(self.notes))
        _check_zero_stage(self.zero_stage)
        _check(len(ranks) > 0, "a plan needs at least one rank")
        _check(
            _is_int(self.global_batch_size) and self.global_batch_size >= 1,
            f"global_batch_size must be an integer, 1 or more; got {self.global_batch_size!r}",
        )
        total = sum(rank.num_samples for rank in ranks)
        _check(
            total == self.global_batch_size,
            f"the ranks' micro-batches add up to {total} samples, global_batch_size is {self.global_batch_size}",
        )
        if self.zero_stage >= 2:
            counts = [len(rank.micro_batch_sizes) for rank in ranks]
            _check(
                len(set(counts)) == 1,
                f"at stage {self.zero_stage} every rank needs the same number of micro-steps (some may be 0); "
                f"got {counts}",
            )
        if self.shard_ratios is not None:
            object.__setattr__(self, "shard_ratios", check_shard_ratios(self.shard_ratios, len(ranks)))

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def gradient_accumulation_steps(self) -> int:
        """The largest number of micro-steps of any rank."""
        return max(len(rank.micro_batch_sizes) for rank in self.ranks)

    @classmethod
    def manual(
        cls, micro_batch_sizes: Sequence[int | Sequence[int]] | Mapping[int, int | Sequence[int]], **settings: Any
    ) -> Plan:
        """Make a plan from batches given by hand.

        Args:
            micro_batch_sizes: one entry a rank, as a list or by rank number: a size, or the sizes of its micro-steps.
            settings: fields of ``Plan``; ``zero_stage`` is 0 unless given. At stages 2 and 3 shorter rows get 0s.
        """
        if isinstance(micro_batch_sizes, Mapping):
            expected = set(range(len(micro_batch_sizes)))
            _check(
                set(micro_batch_sizes) == expected,
                f"the batches by rank must name the ranks {sorted(expected)}; got {sorted(micro_batch_sizes)}",
            )
            micro_batch_sizes = [micro_batch_sizes[rank] for rank in range(len(micro_batch_sizes))]
        rows = rows_by_rank(micro_batch_sizes)
        settings = {"zero_stage": 0, **settings}
        if settings["zero_stage"] in (2, 3):
            longest = max(map(len, rows), default=0)
            rows = [row + (0,) * (longest - len(row)) for row in rows]
        total = sum(map(sum, rows))
        return cls(
            ranks=tuple(RankPlan(micro_batch_sizes=row) for row in rows),
            **{"global_batch_size": total, **settings},
        )

    def check_cluster(self, world_size: int, device_ids: Sequence[str | None] | None = None) -> None:
        """Refuse to run on other devices than the plan was made for.

        Raises:
            PlanMismatchError: another number of ranks, or a rank sits on another card.
        """
        if world_size != self.world_size:
            raise PlanMismatchError(
                f"the plan is for {self.world_size} ranks, this run has {world_size}; make a new plan for "
                f"{world_size}, or start {self.world_size} ranks"
            )
        for rank, (row, actual) in enumerate(zip(self.ranks, device_ids or (), strict=False)):
            if row.device_id is not None and actual is not None and row.device_id != actual:
                raise PlanMismatchError(
                    f"rank {rank} runs on card {actual}, the plan was made with {row.device_id} ({row.device}) there; "
                    "make a new plan, or order the cards as they were (CUDA_DEVICE_ORDER=PCI_BUS_ID keeps the order)"
                )

    @property
    def checksum(self) -> str:
        """A short name for what the plan says; equal plans have equal ones."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def to_json(self) -> str:
        return dump_record("plan", PLAN_VERSION, self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what ``to_json`` wrote.

        Raises:
            ConfigError: not JSON, not a plan, or of a version this release does not read.
        """
        data = parse_record("plan", PLAN_VERSION, text)
        data["ranks"] = tuple(build_record(RankPlan, rank) for rank in _listed(data, "ranks"))
        if data.get("predicted") is not None:
            data["predicted"] = build_record(Prediction, data["predicted"])
        return build_record(cls, data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all."""
        write_text_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Raises:
            ConfigError: the file cannot be read, or does not hold a plan.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the plan {os.fspath(path)!r}: {error}") from error
        return cls.from_json(text)


def rows_by_rank(micro_batch_sizes: Sequence[int | Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the sizes of every rank's micro-steps, where a rank may also have its only size.

    Raises:
        ConfigError: something else than whole numbers, or lists of them.
    """
    try:
        return [
            (operator.index(row),) if hasattr(row, "__index__") else tuple(operator.index(size) for size in row)
            for row in micro_batch_sizes
        ]
    except TypeError as error:
        raise ConfigError(
            f"micro_batch_sizes needs a size, or a list of sizes, for every rank; got {micro_batch_sizes!r}"
        ) from error


def profile_of(plan: Plan, profiles: Sequence[ClusterProfile]) -> ClusterProfile:
    """Return the profile of the stage and shards that ``plan`` was made for."""
    return next(p for p in profiles if (p.zero_stage, p.shard_ratios) == (plan.zero_stage, plan.shard_ratios))


def _listed(data: Mapping[str, Any], name: str) -> list[Any]:
    _check(isinstance(data.get(name), list), f"expected {name} to be a list; got {type(data.get(name)).__name__}")
    return list(data[name])


def check_shard_ratios(shard_ratios: Sequence[float], world_size: int) -> tuple[float, ...]:
    """Return the ratios as floats that add up to 1.

    Raises:
        ConfigError: not one ratio a rank, or a ratio negative or not finite, or all of them 0.
    """
    try:
        ratios = tuple(float(ratio) for ratio in shard_ratios)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"shard_ratios must be a sequence of numbers; got {shard_ratios!r}") from error
    _check(len(ratios) == world_size, f"shard_ratios needs one ratio a rank: {world_size}; got {len(ratios)}")
    _check(
        all(math.isfinite(ratio) and ratio >= 0 for ratio in ratios) and sum(ratios) > 0,
        f"shard_ratios must be finite, 0 or more, and not all 0; got {list(ratios)}",
    )
    if not math.isfinite(sum(ratios)):  # as of numbers near the largest float
        ratios = tuple(ratio / max(ratios) for ratio in ratios)
    total = sum(ratios)
    return ratios if abs(total - 1) < 1e-12 else tuple(ratio / total for ratio in ratios)


def write_text_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path`` so that the file is never seen half written.

    Raises:
        ConfigError: it cannot be written there.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")  # a pipe or a device is written to, not replaced
            return
        _replace_text(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def _replace_text(path: Path, text: str) -> None:
    # Not by tempfile, whose files only their owner may read.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
