"""Pictures of profiles, plans and runs. Needs matplotlib (extra ``plot``), imported when something is drawn.

    draw_curves, draw_timeline, draw_memory, draw_training -> figure -> save_figure() to a file, or svg_text()

A figure is known to nobody but who made it, so that none is to be closed. The same picture gives the same file.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from poplar.curve import curve_of
from poplar.errors import ConfigError
from poplar.plan import ClusterProfile, Plan
from poplar.planning.cost import peak_memory_bytes
from poplar.planning.notes import listed
from poplar.planning.timeline import COLLECTIVE, COMPUTE, IDLE, OPTIMIZER, Span, timeline
from poplar.tables import MAX_ROWS, format_bytes, format_seconds

NO_MATPLOTLIB = "pictures need matplotlib: python -m pip install matplotlib"
_CARD_COLORS = ("#1b6ca8", "#e0a030", "#4a9a5b", "#8e5aa8", "#7a6a5a", "#3fa7b5")
_SPAN_COLORS = {IDLE: "#e4e4e4", COLLECTIVE: "#c0504d", OPTIMIZER: "#555555"}
_LIMIT_COLOR = "#c0504d"
_SMALL = {"va": "center", "fontsize": 7}
_LABEL_SHARE = 0.03
"""Share of the time axis from which on a box is wide enough for its number."""

Series = Sequence[tuple[int, float]]
"""(step, value)."""


def can_draw() -> bool:
    """Tell whether matplotlib is here, without importing it."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(rows: int, columns: int, size: tuple[float, float], **settings: Any) -> tuple[Any, Any]:
    """Return a figure and its axes, as ``pyplot.subplots`` does.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(NO_MATPLOTLIB) from error
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, **settings)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure; the file's ending says as what.

    Raises:
        ConfigError: matplotlib does not know the ending.
    """
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with rc_context({"svg.hashsalt": "poplar"}):
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except ValueError as error:
        raise ConfigError(f"cannot draw into {str(path)!r}: {error}") from error


def svg_text(figure: Any) -> str:
    """Return a figure as an ``<svg>`` element to put into a page: text stays text, and nothing is loaded or linked."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "poplar", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def draw_curves(profile: ClusterProfile) -> Any:
    """Draw what each kind of card measured, with the spread of repeated measurements, and the curve through it.

    Every rank's points are drawn, those of ranks alike once. The line is one rank's: of those that run the largest
    batch, the one in the middle.
    """
    figure, axes = new_figure(1, 1, (7.0, 4.0))
    colors = _card_colors(profile)
    for card, ranks in _ranks_by_card(profile).items():
        color, label = colors[card], _plain(f"{card} ({listed('rank', ranks)})")
        rows = [profile.ranks[rank] for rank in ranks]
        largest = max(row.max_micro_batch_size for row in rows)
        if largest == 0:
            axes.plot([], [], color=color, label=f"{label}: no batch fits")
            continue
        for points, spreads in dict.fromkeys((row.points, row.point_spreads) for row in rows if row.points):
            widths = dict(spreads)
            # A spread is the width of the middle half of the measurements.
            errors = [seconds * 1e3 * widths.get(size, 0.0) / 2 for size, seconds in points]
            sizes, times = zip(*((size, seconds * 1e3) for size, seconds in points), strict=True)
            axes.errorbar(sizes, times, errors, fmt="o", markersize=4, capsize=3, linewidth=1, color=color)
        curves = sorted(
            (curve_of(row) for row in rows if row.max_micro_batch_size == largest), key=lambda c: c.seconds(largest)
        )
        curve = curves[(len(curves) - 1) // 2]
        axes.plot(range(1, largest + 1), curve.seconds_array()[1:] * 1e3, color=color, label=label)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("samples of a micro-batch")
    axes.set_ylabel("ms of a micro-step")
    axes.set_title(f"ZeRO stage {profile.zero_stage}, {_plain(profile.precision)}", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    return figure


def draw_timeline(profile: ClusterProfile, before: Plan | None, after: Plan) -> Any:
    """Draw a step rank by rank as the curves predict it: above the equal split, below the plan, on one time axis.

    Args:
        before: the equal split; None where there is none.

    Raises:
        PlanMismatchError, InfeasiblePlanError, ConfigError: a plan does not go with the profile.
    """
    plans = [(name, plan) for name, plan in (("equal split", before), ("this plan", after)) if plan is not None]
    lanes = _lanes(profile, [plan for _, plan in plans])
    size = (8.0, 0.9 + len(plans) * (0.5 + 0.3 * len(lanes)))
    figure, all_axes = new_figure(len(plans), 1, size, sharex=True, squeeze=False)
    spans_by_plan = [timeline(profile, plan) for _, plan in plans]
    longest_s = max(spans[-1].end_s for by_rank in spans_by_plan for spans in by_rank if spans)
    colors = _card_colors(profile)
    for axes, (name, _), by_rank in zip(all_axes[:, 0], plans, spans_by_plan, strict=True):
        for place, (_, rank) in enumerate(lanes):
            for span in by_rank[rank]:
                _draw_span(axes, place, span, colors[profile.ranks[rank].device], longest_s)
        _name_lanes(axes, [label for label, _ in lanes])
        step_s = max(spans[-1].end_s for spans in by_rank if spans)
        axes.set_title(f"{name}: {format_seconds(step_s)} a step, predicted", fontsize=10, loc="left")
    all_axes[-1, 0].set_xlim(0, longest_s * 1e3)
    all_axes[-1, 0].set_xlabel("ms")
    _add_legend(figure, {**{f"micro-steps of {card}": color for card, color in colors.items()}, **_SPAN_COLORS})
    return figure


def draw_memory(profile: ClusterProfile, plan: Plan) -> Any:
    """Draw by rank the model state, the peak at its largest micro-batch, and the memory that it may use."""
    lanes = _lanes(profile, [plan])
    figure, axes = new_figure(1, 1, (8.0, 1.3 + 0.3 * len(lanes)))
    colors = _card_colors(profile)
    rows = []
    for _, rank in lanes:
        measured, largest = profile.ranks[rank], max(plan.ranks[rank].micro_batch_sizes, default=0)
        peak = peak_memory_bytes(measured, largest)
        rows.append((colors[measured.device], largest, peak, measured.state_bytes, measured.memory_limit_bytes))
    most = max((number or 0 for row in rows for number in row[2:]), default=0)
    unit, unit_bytes = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    for place, (color, largest, peak, state, limit) in enumerate(rows):
        if state is not None:
            axes.barh(place, state / unit_bytes, 0.7, color=color)
        if peak is not None:
            axes.barh(place, peak / unit_bytes, 0.7, color=color, alpha=0.5)
        if limit is not None:
            axes.plot([limit / unit_bytes] * 2, [place - 0.4, place + 0.4], color=_LIMIT_COLOR, linewidth=2)
        text = f"{format_bytes(peak)} at {largest}" if peak is not None else "not measured"
        axes.text(max(peak or 0, limit or 0) / unit_bytes, place, f"  {text}", **_SMALL)
    _name_lanes(axes, [label for label, _ in lanes])
    axes.set_xlim(0, 1.25 * most / unit_bytes or 1)  # room for the texts
    axes.set_xlabel(f'{unit}; the number behind "at" is the largest micro-batch')
    _add_legend(figure, {"model state": "#444444", "peak": "#a1a1a1", "may use": _LIMIT_COLOR})
    return figure


def draw_training(losses: Series, eval_losses: Series, step_s: Mapping[str, Series]) -> Any:
    """Draw the losses over the steps, and below the seconds of each step.

    Args:
        step_s: by strategy, of the steps that were cut by it.
    """
    figure, (above, below) = new_figure(2, 1, (8.0, 4.6), sharex=True, height_ratios=(3, 2))
    above.plot(*_columns(losses), color=_CARD_COLORS[0], linewidth=1, label="training")
    if eval_losses:
        above.plot(*_columns(eval_losses), "o", color=_CARD_COLORS[1], markersize=5, label="held-out")
    above.set_ylabel("loss")
    above.legend(frameon=False, fontsize=8)
    # The plan's own strategy first, then that of the equal split.
    for color, (strategy, series) in zip(cycle(_CARD_COLORS), step_s.items(), strict=False):
        steps, times = _columns(series)
        below.plot(steps, [s * 1e3 for s in times], ".", color=color, markersize=4, label=_plain(f"split: {strategy}"))
    below.set_ylim(bottom=0)
    below.set_xlabel("step")
    below.set_ylabel("ms a step")
    if step_s:
        below.legend(frameon=False, fontsize=8)
    return figure


def _ranks_by_card(profile: ClusterProfile) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, measured in enumerate(profile.ranks):
        ranks.setdefault(measured.device, []).append(rank)
    return ranks


def _card_colors(profile: ClusterProfile) -> dict[str, str]:
    return dict(zip(_ranks_by_card(profile), cycle(_CARD_COLORS), strict=False))


def _lanes(profile: ClusterProfile, plans: Sequence[Plan]) -> list[tuple[str, int]]:
    """Return (name, rank) for the ranks to draw: all, or of many one for those with the same card and batches."""
    groups: dict[object, list[int]] = {}
    for rank, measured in enumerate(profile.ranks):
        alike = (measured.device, *(plan.ranks[rank].micro_batch_sizes for plan in plans))
        groups.setdefault(alike if profile.world_size > MAX_ROWS else rank, []).append(rank)
    return [(f"{listed('rank', ranks)}, {profile.ranks[ranks[0]].device}", ranks[0]) for ranks in groups.values()]


def _draw_span(axes: Any, place: int, span: Span, card_color: str, longest_s: float) -> None:
    seconds = span.end_s - span.begin_s
    color = card_color if span.kind == COMPUTE else _SPAN_COLORS[span.kind]
    axes.barh(place, seconds * 1e3, 0.8, span.begin_s * 1e3, color=color, edgecolor="white", linewidth=0.5)
    if span.micro_batch_size and seconds > _LABEL_SHARE * longest_s:
        middle_s = span.begin_s + seconds / 2
        axes.text(middle_s * 1e3, place, str(span.micro_batch_size), ha="center", color="white", **_SMALL)


def _name_lanes(axes: Any, names: Sequence[str]) -> None:
    """Name the rows; the first is on top."""
    axes.set_yticks(range(len(names)), [_plain(name) for name in names], fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _add_legend(figure: Any, colors: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=_plain(name)) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), frameon=False, fontsize=8)


def _columns(series: Series) -> tuple[list[int], list[float]]:
    return [step for step, _ in series], [value for _, value in series]


def _plain(text: str) -> str:
    """Return ``text`` so that matplotlib shows it as it is; between dollars it would read mathematics."""
    return text.replace("$", r"\$")
