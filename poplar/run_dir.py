"""Read what a run left in its directory, whole runs and unfinished ones; ``progress.RunFiles`` writes it.

    config.json, plan.json, metrics.jsonl    once a run has begun to train
    profile.json                             where the cards were measured, so not for a plan that was given
    record.json                              once the run has ended, if it was long enough to be measured

Files that a person copied, cut or edited are refused with the file's name and what was expected of it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from poplar.errors import ConfigError
from poplar.plan import ClusterProfile, Plan
from poplar.planning.record import StepRecord

_Record = TypeVar("_Record")
_LARGEST = 1e100


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """A line of ``metrics.jsonl`` on a training step; what is not known, or is not finite, is None."""

    step: int
    loss: float | None
    step_s: float | None
    strategy: str
    """How the step was cut: the plan's own strategy, or "equal" in steps for comparison."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run, read from its files."""

    name: str
    """Of the directory."""
    config: dict[str, Any]
    """The settings, and what the run added to them."""
    plan: Plan
    profile: ClusterProfile | None
    """None: nothing was profiled, the plan was given."""
    record: StepRecord | None
    """None: the run has not ended, or was too short to be measured."""
    steps: tuple[LoggedStep, ...]
    eval_losses: tuple[tuple[int, float], ...]
    """(step, held-out loss)."""


def read_run(run_dir: str | os.PathLike[str]) -> RecordedRun:
    """Read a run directory.

    Raises:
        ConfigError: no such folder, or a file that is missing, damaged, or of another run; the message says which.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ConfigError(f"no run directory {os.fspath(run_dir)!r}; `poplar train` says at its end where it wrote")
    config = _read(folder / "config.json", "the settings of a run", _parse_config)
    plan = _read(folder / "plan.json", "a plan", _parse_plan)
    profile = _read_if_there(folder / "profile.json", "a profile", _parse_profile)
    record = _read_if_there(folder / "record.json", "a record of predicted and measured steps", StepRecord.from_json)
    steps, eval_losses = _read(folder / "metrics.jsonl", "a line for every step", _parse_metrics)
    run = RecordedRun(
        name=folder.resolve().name,
        config=config,
        plan=plan,
        profile=profile,
        record=record,
        steps=steps,
        eval_losses=eval_losses,
    )
    _check_same_run(run, folder)
    return run


def _check_same_run(run: RecordedRun, folder: Path) -> None:
    """Refuse files that do not go together, as after copying some of them by hand."""
    num_ranks = {"plan.json": run.plan.world_size}
    predicted = run.plan.predicted
    for name in ("compute_s", "idle_s", "peak_memory_bytes"):
        values = getattr(predicted, name) if predicted is not None else ()
        if values:
            num_ranks[f"{name} of plan.json"] = len(values)
    if run.profile is not None:
        num_ranks["profile.json"] = run.profile.world_size
        if run.profile.zero_stage != run.plan.zero_stage:
            raise ConfigError(
                f"{folder}: profile.json is of ZeRO stage {run.profile.zero_stage}, plan.json of "
                f"{run.plan.zero_stage}; expected files of one run"
            )
    if run.record is not None and run.record.parts is not None:
        num_ranks["record.json"] = len(run.record.parts.compute_s)
    if len(set(num_ranks.values())) > 1:
        counts = ", ".join(f"{name} has {number}" for name, number in num_ranks.items())
        raise ConfigError(f"{folder}: expected files of one run, with as many ranks in each; {counts}")


def _read(path: Path, expected: str, parse: Callable[[str], _Record]) -> _Record:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: expected {expected}; has the run begun to train?") from None
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:  # ValueError: a ConfigError, or not UTF-8
        raise ConfigError(f"cannot read {path}: expected {expected}; {error}") from error


def _read_if_there(path: Path, expected: str, parse: Callable[[str], _Record]) -> _Record | None:
    return _read(path, expected, parse) if path.exists() else None


def _parse_config(text: str) -> dict[str, Any]:
    config = json.loads(text)
    if not isinstance(config, dict):
        raise ConfigError(f"got {type(config).__name__}")
    return config


def _parse_plan(text: str) -> Plan:
    plan = Plan.from_json(text)
    _check_notes(plan.notes)
    predicted = plan.predicted
    if predicted is not None:
        by_rank = (*predicted.compute_s, *predicted.idle_s, *predicted.peak_memory_bytes)
        for value in (predicted.step_s, predicted.collective_s, *by_rank):
            _number(value)
    return plan


def _parse_profile(text: str) -> ClusterProfile:
    profile = ClusterProfile.from_json(text)
    _check_notes(profile.notes)
    for rank in profile.ranks:
        for value in (rank.state_bytes, rank.memory_limit_bytes, *(peak for _, peak in rank.memory_points)):
            _number(value)
    return profile


def _check_notes(notes: Iterable[object]) -> None:
    for note in notes:
        if not isinstance(note, str):
            raise ConfigError(f"got {note!r} for a note")


def _parse_metrics(text: str) -> tuple[tuple[LoggedStep, ...], tuple[tuple[int, float], ...]]:
    """Return the steps and the held-out losses of the last run in the file: one that reuses a folder goes on in it."""
    steps: list[LoggedStep] = []
    eval_losses: list[tuple[int, float]] = []
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1], start=1):  # behind the last end of line: nothing, or a line half written
        try:
            values = json.loads(line)
            step = _number(values["step"])
            if step is None:
                raise ValueError("a step must have a number")
            if "eval_loss" in values:
                loss = _number(values["eval_loss"])
                eval_losses += [(int(step), loss)] if loss is not None else []
                continue
            if steps and step <= steps[-1].step:
                steps, eval_losses = [], []
            steps.append(
                LoggedStep(
                    step=int(step),
                    loss=_number(values["loss"]),
                    step_s=_number(values["step_s"]),
                    strategy=str(values["strategy"]),
                )
            )
        except KeyError as error:
            raise ConfigError(f"line {number} has no {error}") from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"line {number}: {error}") from error
    return tuple(steps), tuple(eval_losses)


def _number(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"got {value!r} for a number")
    # What has diverged so far is not drawn.
    return value if abs(value) < _LARGEST and math.isfinite(value) else None
