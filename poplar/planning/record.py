"""Predicted against measured: what a step was to take and what it took, by rank and by part.

    Plan.predicted, seconds of steps, what each rank waited in them -> StepRecord -> lines of text, record.json

[Note: parts by waiting]
Over the plan's own steps every rank knows the median seconds of a step and, of those, the seconds that its process
waited in collectives. The rank that computes longest finds the others there already and waits for the collectives
alone. So

    collective_s = the least that any rank waited
    idle_s       = what a rank waited beyond that
    compute_s    = the step less what the rank waited, the loading of its samples included

That holds where the process itself waits: on CPU ranks, emulated ones included. On a card the host hands its work over
and does not wait for it, so that only the step is known there and the parts are None.

At stages 2 and 3 another rank may be the slowest in each micro-step, and then all of them idle at some time. What they
all idle cannot be told from collectives by waiting. So the prediction is counted in the same way when it is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from poplar.errors import ConfigError
from poplar.json_records import build_record, dump_record, parse_record
from poplar.plan import Prediction
from poplar.tables import format_seconds

RECORD_VERSION = 1
MAX_ERROR = 0.15
"""A step that differs from its prediction by a larger share than this is explained."""
NOT_ON_CARDS = "parts are not known on cards: the host does not wait there for what the device computes"


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """What a step consists of; for every rank the three add up to it.

    Raises:
        ConfigError: seconds that are not finite or below 0, or parts of different numbers of ranks.
    """

    compute_s: tuple[float, ...]
    """By rank: its micro-steps and its optimizer step."""
    idle_s: tuple[float, ...]
    """By rank: waiting for slower ranks."""
    collective_s: float
    """Collectives that compute does not hide, and what all ranks idle."""

    def __post_init__(self) -> None:
        for name in ("compute_s", "idle_s"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_seconds([*self.compute_s, *self.idle_s, self.collective_s])
        if len(self.compute_s) != len(self.idle_s) or not self.compute_s:
            raise ConfigError(
                f"compute_s and idle_s hold one entry a rank; got {len(self.compute_s)} and {len(self.idle_s)}"
            )


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step of a plan as it was predicted and as it was measured: see [Note: parts by waiting].

    Raises:
        ConfigError: seconds that are not finite or below 0, or a prediction for another number of ranks.
    """

    predicted: Prediction | None
    """None: nothing was profiled, and the batches were given by hand."""
    step_s: float
    """Measured seconds of a step."""
    parts: StepParts | None = None
    """Measured parts of it. None: not known, on cards."""

    def __post_init__(self) -> None:
        _check_seconds([self.step_s, *([self.predicted.step_s] if self.predicted is not None else [])])
        expected = self.predicted_parts
        if self.parts is not None and expected is not None and len(expected.compute_s) != len(self.parts.compute_s):
            raise ConfigError(
                f"the prediction is for {len(expected.compute_s)} ranks, {len(self.parts.compute_s)} were measured"
            )

    @classmethod
    def from_waits(
        cls, predicted: Prediction | None, step_s: float, waited_s: Sequence[float] | None = None
    ) -> StepRecord:
        """Make the record of a measured step.

        Args:
            waited_s: by rank, seconds of the step that its process waited in collectives. None: on cards.
        """
        if waited_s is None:
            return cls(predicted=predicted, step_s=step_s)
        collective_s = min(waited_s)
        parts = StepParts(
            compute_s=tuple(step_s - waited for waited in waited_s),
            idle_s=tuple(waited - collective_s for waited in waited_s),
            collective_s=collective_s,
        )
        return cls(predicted=predicted, step_s=step_s, parts=parts)

    @property
    def error(self) -> float | None:
        """By what share the step took longer than predicted, below 0 if shorter; None without a prediction."""
        if self.predicted is None or self.predicted.step_s <= 0:
            return None
        return self.step_s / self.predicted.step_s - 1

    @property
    def predicted_parts(self) -> StepParts | None:
        """The prediction's parts, counted as measured ones are: what all ranks idle is among the collectives."""
        predicted = self.predicted
        if predicted is None or not predicted.compute_s or not predicted.idle_s:
            return None
        shared_s = min(predicted.idle_s)
        return StepParts(
            compute_s=predicted.compute_s,
            idle_s=tuple(idle - shared_s for idle in predicted.idle_s),
            collective_s=predicted.collective_s + shared_s,
        )

    def lines(self) -> list[str]:
        """Return the record as text: the step, each rank, the collectives, and why the step is off if it is."""
        lines = [self.summary()]
        if self.parts is not None:
            expected = self.predicted_parts
            pairs = zip(self.parts.compute_s, self.parts.idle_s, strict=True)
            for rank, (compute_s, idle_s) in enumerate(pairs):
                compute = _compared("compute", compute_s, expected.compute_s[rank] if expected else None)
                idle = _compared("idle", idle_s, expected.idle_s[rank] if expected else None)
                lines.append(f"rank {rank}: {compute}; {idle}")
            lines.append(self.collectives())
        return [*lines, *self.explanation()]

    def summary(self) -> str:
        """Return the step in a line."""
        if self.error is None:
            return _compared("step:", self.step_s, None) + ", nothing was predicted"
        assert self.predicted is not None
        return f"{_compared('step:', self.step_s, self.predicted.step_s)} ({self.error_text()})"

    def collectives(self) -> str:
        """Return the collectives in a line; empty where parts are not known."""
        if self.parts is None:
            return ""
        expected = self.predicted_parts
        return _compared("collectives:", self.parts.collective_s, expected.collective_s if expected else None)

    def explanation(self) -> list[str]:
        """Return sentences on a step that is off by more than ``MAX_ERROR``, and on parts that are not known."""
        unknown = [NOT_ON_CARDS] if self.parts is None else []
        if self.error is None or abs(self.error) <= MAX_ERROR:
            return unknown
        off = f"a step was {self.error_text()} than predicted"
        if self.parts is not None and self.predicted_parts is not None:
            off += "; " + _main_difference(self.predicted_parts, self.parts, sign=1 if self.error > 0 else -1)
        return [off, *unknown]

    def error_text(self) -> str:
        """Return by how much the step was longer or shorter than predicted; there must be a prediction."""
        assert self.error is not None
        return f"{abs(self.error):.0%} {'longer' if self.error > 0 else 'shorter'}"

    def to_json(self) -> str:
        return dump_record("record", RECORD_VERSION, self)

    @classmethod
    def from_json(cls, text: str) -> StepRecord:
        """Read what ``to_json`` wrote.

        Raises:
            ConfigError: not JSON, not a record, or of a version this release does not read.
        """
        data = parse_record("record", RECORD_VERSION, text)
        for name, kind in (("predicted", Prediction), ("parts", StepParts)):
            if data.get(name) is not None:
                data[name] = build_record(kind, data[name])
        return build_record(cls, data)


def _main_difference(expected: StepParts, got: StepParts, sign: int) -> str:
    """Say which part moved most in the direction of the step, 1 for longer and -1 for shorter.

    That one rank waits longer follows from another one's compute. So of idle time the mean is looked at, which is the
    most only where ranks are out of balance all around; of equal parts the first counts.
    """
    by_rank = zip(expected.compute_s, got.compute_s, strict=True)
    parts = [(f"compute of rank {rank}", before_s, now_s) for rank, (before_s, now_s) in enumerate(by_rank)]
    parts.append(("collectives", expected.collective_s, got.collective_s))
    parts.append(("idle time, on average over the ranks", _mean(expected.idle_s), _mean(got.idle_s)))
    moved_s = [sign * (now_s - before_s) for _, before_s, now_s in parts]
    most_s = max(moved_s)
    name, before_s, now_s = parts[next(place for place, s in enumerate(moved_s) if math.isclose(s, most_s))]
    return (
        f"what differs most is {name}: {format_seconds(now_s)} instead of {format_seconds(before_s)}, "
        f"{format_seconds(abs(now_s - before_s))} {'more' if now_s > before_s else 'less'}"
    )


def _compared(name: str, measured_s: float, predicted_s: float | None) -> str:
    before = f"predicted {format_seconds(predicted_s)}, " if predicted_s is not None else ""
    return f"{name} {before}measured {format_seconds(measured_s)}"


def _check_seconds(values: Iterable[float]) -> None:
    for value in values:
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise ConfigError(f"a record holds finite seconds, 0 or more; got {value!r}")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
