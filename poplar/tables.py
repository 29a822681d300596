"""Plans and results as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from poplar.plan import ClusterProfile, Plan, RankProfile

if TYPE_CHECKING:
    from poplar.planning.record import StepParts, StepRecord

Row = tuple[str, ...]
"""The cells of a table's line."""
MAX_ROWS = 24
"""A table by rank with more rows puts neighbours that look alike into one."""
_MISSING = "-"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay cells out in columns: numbers to the right, words to the left."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    numeric = [all(_is_numeric(row[i]) for row in rows) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def describe_plan(plan: Plan, profile: ClusterProfile | None = None) -> str:
    """Return the table of a plan, what it comes to, and its notes but for those on how each stage fared."""
    _, shown = split_notes(plan, profile)
    return "\n".join([plan_table(plan, profile), "", plan_summary(plan), *(f"- {note}" for note in shown)])


def split_notes(plan: Plan, profile: ClusterProfile | None = None) -> tuple[list[str], list[str]]:
    """Return the notes on how each stage fared, and all others."""
    # The allocator passes on what the profile says, so that a plan alone says it too.
    notes = dict.fromkeys([*(profile.notes if profile is not None else ()), *plan.notes])
    on_stages = [note for note in notes if note.removeprefix("taken: ").startswith("stage ")]
    return on_stages, [note for note in notes if note not in on_stages]


def plan_table(plan: Plan, profile: ClusterProfile | None = None) -> str:
    """Return the plan by rank: card, largest batch, speed, micro-batches, predicted compute, idle and memory."""
    return format_table(*plan_rows(plan, profile))


def plan_rows(plan: Plan, profile: ClusterProfile | None = None) -> tuple[Row, list[Row]]:
    """Return the header and the rows of ``plan_table``."""
    header = ("rank", "card", "largest", "samples/s", "micro-batches", "compute", "idle", "memory")
    rows: list[Row] = []
    for rank, row in enumerate(plan.ranks):
        measured = profile.ranks[rank] if profile is not None else None
        predicted = plan.predicted
        rows.append(
            (
                str(rank),
                row.device or (measured.device if measured else "") or _MISSING,
                str(measured.max_micro_batch_size) if measured else _MISSING,
                _peak_speed(measured),
                format_sizes(row.micro_batch_sizes),
                format_seconds(predicted.compute_s[rank]) if predicted and predicted.compute_s else _MISSING,
                format_share(predicted.idle_s[rank], predicted.step_s) if predicted and predicted.idle_s else _MISSING,
                _memory(plan, rank, measured),
            )
        )
    return header, _shortened(rows)


def plan_summary(plan: Plan) -> str:
    """Return the plan in a line: stage, strategy, batch, predicted step."""
    text = f"global batch {plan.global_batch_size}, ZeRO stage {plan.zero_stage}, strategy {plan.strategy}"
    if plan.predicted is not None and plan.predicted.step_s > 0:
        speed = plan.global_batch_size / plan.predicted.step_s
        text += f", predicted {format_seconds(plan.predicted.step_s)} a step ({speed:.1f} samples/s)"
    return text


def profile_table(profile: ClusterProfile) -> str:
    """Return what was measured, by rank: card, largest batch, best speed, memory."""
    rows: list[Row] = []
    for rank, measured in enumerate(profile.ranks):
        limit, state = measured.memory_limit_bytes, measured.state_bytes
        rows.append(
            (
                str(rank),
                measured.device,
                str(measured.max_micro_batch_size),
                _peak_speed(measured),
                " ".join(f"{size}:{format_seconds(seconds).replace(' ', '')}" for size, seconds in measured.points),
                format_bytes(state) if state is not None else _MISSING,
                format_bytes(limit) if limit is not None else _MISSING,
            )
        )
    header = ("rank", "card", "largest", "samples/s", "time by batch", "model state", "may use")
    return format_table(header, _shortened(rows))


def closing_table(plan: Plan, record: StepRecord, equal_step_s: float | None = None) -> str:
    """Return what a run measured: compute and idle time by rank and speed, each against its prediction.

    Args:
        equal_step_s: measured seconds of a step of the equal split. None: it was not measured.
    """
    step_s = record.step_s
    lines = [format_table(*record_rows(plan, record)), ""]
    line = f"this plan:   {plan.global_batch_size / step_s:.1f} samples/s, {format_seconds(step_s)} a step"
    if record.predicted is not None and record.error is not None:
        line += f" (predicted {format_seconds(record.predicted.step_s)}, {record.error_text()})"
    lines.append(line)
    if equal_step_s is not None:
        speed = plan.global_batch_size / equal_step_s
        lines.append(
            f"equal split: {speed:.1f} samples/s, {format_seconds(equal_step_s)} a step (measured in this run; the "
            f"plan is {equal_step_s / step_s:.2f} times as fast)"
        )
    lines += [record.collectives()] if record.parts is not None else []
    return "\n".join([*lines, *record.explanation()])


def record_rows(plan: Plan, record: StepRecord) -> tuple[Row, list[Row]]:
    """Return header and rows of a table by rank: measured compute and idle time, each before its prediction."""
    header = ("rank", "card", "micro-batches", "compute", "predicted", "idle", "predicted")
    expected = record.predicted_parts
    predicted_s = record.predicted.step_s if record.predicted is not None else 0.0
    rows: list[Row] = []
    for rank, row in enumerate(plan.ranks):
        compute, idle = _part_cells(record.parts, rank, record.step_s)
        predicted_compute, predicted_idle = _part_cells(expected, rank, predicted_s)
        name = (str(rank), row.device or _MISSING, format_sizes(row.micro_batch_sizes))
        rows.append((*name, compute, predicted_compute, idle, predicted_idle))
    return header, _shortened(rows)


def join_like_rows(rows: Sequence[Sequence[str]]) -> list[Row]:
    """Put neighbours that differ in their first cell alone into one row, "0-511"."""
    joined = []
    for rest, members in groupby(rows, key=lambda row: tuple(row[1:])):
        names = [row[0] for row in members]
        joined.append((names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}", *rest))
    return joined


def format_sizes(sizes: Sequence[int]) -> str:
    """Write micro-batch sizes with repeats counted: (24, 24, 5) is "2 x 24 + 5"."""
    parts = [(size, len(list(same))) for size, same in groupby(sizes)]
    return " + ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in parts) or "0"


def format_seconds(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.1f} ms"
        if seconds < 0.01
        else f"{seconds * 1e3:.0f} ms"
    )


def format_bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1024:.0f} KiB" if count >= 1024 else f"{count:.0f} B"


def format_share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else _MISSING


def _shortened(rows: list[Row]) -> list[Row]:
    return join_like_rows(rows) if len(rows) > MAX_ROWS else rows


def _part_cells(parts: StepParts | None, rank: int, step_s: float) -> tuple[str, str]:
    """Return a rank's compute time and idle share."""
    if parts is None:
        return _MISSING, _MISSING
    return format_seconds(parts.compute_s[rank]), format_share(parts.idle_s[rank], step_s)


def _peak_speed(measured: RankProfile | None) -> str:
    if measured is None or not measured.points:
        return _MISSING
    return f"{max(size / seconds for size, seconds in measured.points):.1f}"


def _memory(plan: Plan, rank: int, measured: RankProfile | None) -> str:
    peaks = plan.predicted.peak_memory_bytes if plan.predicted is not None else ()
    peak = peaks[rank] if rank < len(peaks) else None
    if peak is None:
        return _MISSING
    limit = measured.memory_limit_bytes if measured is not None else None
    return f"{format_bytes(peak)} of {format_bytes(limit)}" if limit else format_bytes(peak)


def _is_numeric(cell: str) -> bool:
    first = cell.lstrip("+-")[:1]
    return first.isdigit() or cell == _MISSING
