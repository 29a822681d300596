"""``poplar simulate`` and ``poplar advise``: predict training on cards that are not at hand."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from poplar.catalog import CARDS_VARIABLE, load_user_cards, parse_cluster
from poplar.config import STRATEGIES, ZERO_STAGES
from poplar.errors import ConfigError, InfeasiblePlanError
from poplar.simulation.advice import Advice
from poplar.simulation.advice import advise as make_advice
from poplar.simulation.interconnect import Interconnect, parse_link
from poplar.simulation.model_spec import ModelSpec, parse_model
from poplar.simulation.step_model import PRECISIONS, Cluster
from poplar.simulator import (
    SimulatedRun,
    batch_of_tokens,
    best_run,
    describe_cluster,
    mean_idle_s,
    parse_tokens,
)
from poplar.simulator import (
    simulate as simulate_runs,
)
from poplar.tables import format_seconds, format_share, format_sizes, format_table

_Command = Callable[..., Any]


def _shared_options(command: _Command) -> _Command:
    options = (
        click.option("--cluster", "cluster_text", metavar="CARD:N,...", help="Cards, as 'a800-80g:4,v100s-32g:4'."),
        click.option(
            "--model",
            "model_text",
            metavar="MODEL",
            help="A preset, 'layers=..,width=..,heads=..,vocab=..,seq_len=..', or a recipe as module:name.",
        ),
        click.option("--seq-len", type=int, help="Tokens of a sample.  [default: the preset's or the recipe's]"),
        click.option("--global-tokens", metavar="N", help="Tokens of a step, as '2M'.  [default: 2M]"),
        click.option("--global-batch-size", type=int, help="Samples of a step, instead of --global-tokens."),
        click.option(
            "--link", metavar="LINK", default="", help="'inter=12.5,intra=25,latency-us=10,node=8|all' (GB/s one way)."
        ),
        click.option("--precision", type=click.Choice(PRECISIONS), default="auto", show_default=True),
        click.option("--checkpointing", is_flag=True, help="Activation checkpointing of every block."),
        click.option("--cards", "cards_path", type=click.Path(), help="File of your own cards (docs/simulator.md)."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@_shared_options
@click.option("--zero-stage", default="all", show_default=True, metavar="all|0|1|2|3")
@click.option("--strategy", default="all", show_default=True, metavar="|".join(("all", *STRATEGIES)))
@click.option("--picture", type=click.Path(path_type=Path), help="Draw the speeds into this file (extra 'plot').")
@click.option("--save-plan", type=click.Path(path_type=Path), help="Write the fastest plan as JSON.")
@click.option("--preset", type=click.Choice(["paper"]), help="Run the paper's three clusters instead.")
@click.option("--out", type=click.Path(path_type=Path), help="With --preset: write the page and its pictures here.")
def simulate(
    zero_stage: str,
    strategy: str,
    picture: Path | None,
    save_plan: Path | None,
    preset: str | None,
    out: Path | None,
    as_json: bool,
    **shared: Any,
) -> None:
    """Predict how fast a cluster trains a model, by ZeRO stage and strategy."""
    if preset is not None:
        if (zero_stage, strategy, picture, save_plan) != ("all", "all", None, None):
            raise click.UsageError("--preset paper runs every stage and strategy; its pictures and page go to --out")
        _simulate_paper(out, as_json, shared)
        return
    if out is not None:
        raise click.UsageError(
            "--out belongs to --preset; one picture is drawn by --picture, one plan saved by --save-plan"
        )
    cluster, spec, batch, settings = _resolve(**shared)
    runs = simulate_runs(
        cluster, spec, batch, zero_stages=_stages(zero_stage), strategies=_strategies(strategy), **settings
    )
    best = best_run(runs)
    if best is None:
        raise InfeasiblePlanError(_fits_nowhere(runs))
    if save_plan is not None and best.plan is not None:
        best.plan.save(save_plan)
    if picture is not None:
        from poplar.simulation.pictures import draw_runs

        draw_runs(runs, picture)
    click.echo(json.dumps([run.to_dict() for run in runs], indent=1) if as_json else _describe(runs, best))


@click.command()
@_shared_options
@click.option("--consider", default="", metavar="CARD,...", help="Cards that you think of adding.")
def advise(consider: str, as_json: bool, **shared: Any) -> None:
    """Tell which stage to take, what each kind of card adds, what binds, and what one card more would bring."""
    cluster, spec, batch, settings = _resolve(**shared)
    advice = make_advice(
        cluster, spec, batch, consider=[name for name in consider.split(",") if name.strip()], **settings
    )
    click.echo(json.dumps(advice.to_dict(), indent=1) if as_json else _describe_advice(advice))


def _resolve(
    *,
    cluster_text: str | None,
    model_text: str | None,
    seq_len: int | None,
    global_tokens: str | None,
    global_batch_size: int | None,
    link: str,
    precision: str,
    checkpointing: bool,
    cards_path: str | None,
) -> tuple[Cluster, ModelSpec, int, dict[str, Any]]:
    """Return the cluster, the model, the global batch size and the settings that the options ask for."""
    if cluster_text is None or model_text is None:
        raise click.UsageError("--cluster and --model are needed, as --cluster v100-16g:4,t4-16g:4 --model llama-0.5b")
    if global_tokens is not None and global_batch_size is not None:
        raise click.UsageError("give --global-tokens or --global-batch-size, not both")
    if cards_path is not None:
        load_user_cards(cards_path)  # errors name this file
        os.environ[CARDS_VARIABLE] = cards_path
    if ":" in model_text:
        from poplar.cli.recipe_model import spec_of_recipe

        spec = spec_of_recipe(model_text, seq_len)
    else:
        spec = parse_model(model_text, seq_len)
    if global_batch_size is None:
        global_batch_size = batch_of_tokens(parse_tokens(global_tokens or "2M"), spec)
    cluster = Cluster(names=parse_cluster(cluster_text), link=parse_link(link) if link else Interconnect())
    return cluster, spec, global_batch_size, {"precision": precision, "checkpointing": checkpointing}


def _stages(text: str) -> Sequence[int]:
    if text in ("all", "auto"):
        return ZERO_STAGES
    if text not in map(str, ZERO_STAGES):
        raise ConfigError(f"--zero-stage must be all, 0, 1, 2 or 3; got {text!r}")
    return (int(text),)


def _strategies(text: str) -> Sequence[str]:
    return STRATEGIES if text == "all" else tuple(name.strip() for name in text.split(","))


def _fits_nowhere(runs: Sequence[SimulatedRun]) -> str:
    reasons = dict.fromkeys(f"stage {run.zero_stage}: {run.problem}" for run in runs)
    return f"{runs[0].spec.name} fits nowhere on {describe_cluster(runs[0].cluster.names)}. " + "; ".join(reasons)


def _describe(runs: Sequence[SimulatedRun], best: SimulatedRun) -> str:
    assert best.plan is not None
    lines = [
        f"{best.spec.name} ({best.spec.num_parameters / 1e6:,.1f} M parameters, {best.spec.tokens_per_sample} tokens a "
        f"sample) on {describe_cluster(best.cluster.names)}, {best.plan.precision}, global batch "
        f"{best.plan.global_batch_size}; simulated, nothing was measured here",
        "",
    ]
    equal = {run.zero_stage: run.tokens_per_s for run in runs if run.strategy == "equal"}
    header = ("stage", "strategy", "tokens/s", "over equal", "step", "collectives", "idle", "micro-batches")
    rows = [_row(run, equal.get(run.zero_stage, 0.0)) for run in runs if run.plan is not None]
    lines.append(format_table(header, rows))
    problems = dict.fromkeys(f"stage {run.zero_stage}: {run.problem}" for run in runs if run.plan is None)
    lines += ["", *problems] if problems else []
    lines += ["", f"fastest: stage {best.zero_stage}, {best.strategy}"]
    return "\n".join(lines)


def _row(run: SimulatedRun, equal_tokens_per_s: float) -> tuple[str, ...]:
    assert run.plan is not None and run.prediction is not None
    predicted = run.prediction
    by_card = {row.device: format_sizes(row.micro_batch_sizes) for row in reversed(run.plan.ranks)}
    return (
        str(run.zero_stage),
        run.strategy,
        f"{run.tokens_per_s:.0f}",
        f"{run.tokens_per_s / equal_tokens_per_s:.2f}x" if equal_tokens_per_s else "-",
        format_seconds(predicted.step_s),
        format_share(predicted.collective_s, predicted.step_s),
        format_share(mean_idle_s(predicted), predicted.step_s),
        "; ".join(f"{name}: {by_card[name]}" for name in dict.fromkeys(run.cluster.names)),
    )


def _describe_advice(advice: Advice) -> str:
    best, now = advice.best, advice.best.tokens_per_s
    lines = [
        f"{best.spec.name} on {describe_cluster(best.cluster.names)}: stage {best.zero_stage}, {now:.0f} tokens/s "
        "(simulated, nothing was measured here)",
        "",
        format_table(
            ("stage", "tokens/s", "of the best"),
            [
                (str(run.zero_stage), f"{run.tokens_per_s:.0f}", format_share(run.tokens_per_s, now))
                for run in advice.by_stage
                if run.plan
            ],
        ),
        *(f"stage {run.zero_stage} does not fit: {run.problem}" for run in advice.by_stage if run.plan is None),
        "",
        *(f"binds: {sentence}" for sentence in advice.binds),
        "",
    ]
    rows = []
    for kind in advice.kinds:
        share = (now - kind.tokens_per_s_without) / now
        rows.append(
            (
                kind.name,
                str(kind.count),
                f"{share:+.0%}",
                f"{kind.tokens_per_s_with_one_more / now - 1:+.1%}",
                str(kind.largest_micro_batch_size),
            )
        )
    rows += [(name, "0", "-", f"{speed / now - 1:+.1%}", "-") for name, speed in advice.considered]
    lines.append(format_table(("card", "cards", "they add", "one more brings", "largest micro-batch"), rows))
    slower = [kind.name for kind in advice.kinds if kind.tokens_per_s_without > now]
    lines += [f"without the {name} the cluster is faster: leave it out" for name in slower]
    return "\n".join(lines)


def _simulate_paper(out: Path | None, as_json: bool, shared: dict[str, Any]) -> None:
    given = [
        name for name in ("cluster_text", "model_text", "global_batch_size", "cards_path") if shared[name] is not None
    ]
    if given:
        raise click.UsageError(
            "--preset paper sets cluster, model and batch itself; give --link or --global-tokens at most"
        )
    from poplar.simulation.reproduction import reproduce
    from poplar.simulation.reproduction_page import write_page

    link = parse_link(shared["link"]) if shared["link"] else Interconnect()
    paper = reproduce(link=link, global_tokens=parse_tokens(shared["global_tokens"] or "2M"))
    if out is not None:
        click.echo(f"wrote {write_page(paper, out)}")
    else:
        click.echo(json.dumps(paper.to_dict(), indent=1) + "\n" if as_json else paper.to_text(), nl=False)
