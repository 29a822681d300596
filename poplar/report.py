"""A run on one page: what was run, the plan and why it is that one, what was predicted and what was measured.

    run directory -> read_run() -> sections of HTML, with pictures as inline SVG -> one file, whole or not at all

The page stands alone: no script, no link, nothing that is loaded. Whatever comes from a file is escaped.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from poplar import __version__, pictures
from poplar.allocator import allocate
from poplar.errors import InfeasiblePlanError
from poplar.plan import Plan, write_text_atomically
from poplar.run_dir import RecordedRun, read_run
from poplar.tables import format_seconds, plan_rows, plan_summary, record_rows, split_notes

DEFAULT_NAME = "report.html"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; font-size: 0.9em; } th, td { padding: 0.2em 0.8em; text-align: left; }
th { border-bottom: 1px solid #888; } tr:nth-child(even) td { background: #f5f5f5; }
figure { margin: 1em 0; } figcaption { font-size: 0.85em; color: #555; } svg { max-width: 100%; height: auto; }
footer { margin-top: 3em; font-size: 0.8em; color: #777; }
"""


def write_report(run_dir: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run; return its path.

    Args:
        out: the file to write. None: ``report.html`` in the run directory.

    Raises:
        ConfigError: a file of the run is missing or damaged.
    """
    page = report_page(read_run(run_dir))
    path = Path(out) if out is not None else Path(run_dir) / DEFAULT_NAME
    write_text_atomically(path, page)
    return path


def report_page(run: RecordedRun) -> str:
    """Return the report as HTML."""
    sections = [
        _section("What was run", _settings(run)),
        _section("Plan", _plan(run)),
        _section("Why this stage", _stages(run)),
        _section("Predicted and measured", _record(run)),
        _section("Training", _training(run)),
        _section("Profile", _profile(run)),
        _section("Notes", _list(split_notes(run.plan, run.profile)[1]) or _text("none")),
    ]
    title = escape(f"Poplar run {run.name}")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{''.join(sections)}"
        f"<footer>written by poplar {escape(__version__)}</footer>\n</body>\n</html>\n"
    )


def _settings(run: RecordedRun) -> str:
    known = [(name, value) for name, value in run.config.items() if value is not None]
    rows = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in known]
    return _table(("setting", "value"), rows)


def _plan(run: RecordedRun) -> str:
    return _text(plan_summary(run.plan)) + _table(*plan_rows(run.plan, run.profile))


def _stages(run: RecordedRun) -> str:
    on_stages, _ = split_notes(run.plan, run.profile)
    if on_stages:
        return _list(on_stages)
    if run.profile is None:
        return _text(f"stage {run.plan.zero_stage} was given: nothing was profiled, so that none was chosen")
    return _text(f"stage {run.plan.zero_stage} was the only one that was profiled")


def _record(run: RecordedRun) -> str:
    if run.record is None:
        return _text("no record.json: the run has not ended, or was too short to measure a step")
    record = run.record
    sentences = [record.summary(), *([record.collectives()] if record.parts is not None else []), *record.explanation()]
    return _table(*record_rows(run.plan, record)) + _list(sentences)


def _training(run: RecordedRun) -> str:
    if not run.steps:
        return _text("no step has been taken")
    last = run.steps[-1]
    facts = [f"{last.step} steps" + (f", loss {last.loss:.4f} in the last" if last.loss is not None else "")]
    facts += [f"held-out loss {loss:.4f} after step {step}" for step, loss in run.eval_losses[-1:]]
    step_s: dict[str, list[tuple[int, float]]] = {}
    for logged in run.steps:
        if logged.step_s is not None:
            step_s.setdefault(logged.strategy, []).append((logged.step, logged.step_s))
    for strategy, series in step_s.items():
        median_s = statistics.median(seconds for _, seconds in series)
        facts.append(f"{format_seconds(median_s)} a step, the median of {len(series)} split by {strategy}")
    losses = [(logged.step, logged.loss) for logged in run.steps if logged.loss is not None]
    if not pictures.can_draw():
        return _list(facts) + _text(pictures.NO_MATPLOTLIB)
    return _list(facts) + _figure(pictures.draw_training(losses, run.eval_losses, step_s), "Losses and step times.")


def _profile(run: RecordedRun) -> str:
    profile = run.profile
    if profile is None:
        return _text("nothing was profiled: the plan was given, and there are no curves to draw")
    if not pictures.can_draw():
        return _text(pictures.NO_MATPLOTLIB)
    equal: Plan | None = None
    missing = ""
    try:
        equal = allocate(profile, run.plan.global_batch_size, "equal")
    except InfeasiblePlanError as error:
        missing = f" The equal split does not fit: {error}."
    return (
        _figure(pictures.draw_curves(profile), "Measured micro-steps with the spread of their times, and the curves.")
        + _figure(
            pictures.draw_timeline(profile, equal, run.plan),
            f"A step by the curves: boxes are micro-steps with their samples, grey is idle time.{missing}",
        )
        + _figure(pictures.draw_memory(profile, run.plan), "Memory of every rank, at its largest micro-batch.")
    )


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}</section>\n"


def _text(text: str) -> str:
    return f"<p>{escape(text)}</p>\n"


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(str(line))}</li>\n" for line in lines)
    return f"<ul>\n{items}</ul>\n" if items else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>\n"

    return f"<table>\n{line(header, 'th')}{''.join(line(row, 'td') for row in rows)}</table>\n"


def _figure(figure: object, caption: str) -> str:
    return f"<figure>\n{pictures.svg_text(figure)}<figcaption>{escape(caption)}</figcaption>\n</figure>\n"
