"""The page that ``poplar simulate --preset paper --out DIR`` writes: every number in it comes from the records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from poplar.catalog import find_card
from poplar.config import STRATEGIES
from poplar.plan import write_text_atomically
from poplar.simulation.model_spec import ModelSpec
from poplar.simulation.reproduction import (
    CARDS_OF_A_KIND,
    CLUSTERS,
    MODELS,
    PAPER_HIGH,
    PAPER_LOW,
    SWEEP_MODEL,
    Cell,
    Reproduction,
)
from poplar.simulation.step_model import compute_s
from poplar.simulator import gain_parts

PAGE_NAME = "reproduction.md"


def write_page(paper: Reproduction, folder: Path) -> Path:
    """Write the page and its pictures into ``folder``, and return the page's path.

    Raises:
        ConfigError: matplotlib is missing (extra ``plot``).
    """
    from poplar.simulation.pictures import draw_gains, draw_sweep

    draw_gains(paper, folder / "images" / "reproduction_gains.svg")
    draw_sweep(paper, folder / "images" / "reproduction_sweep.svg")
    write_text_atomically(folder / PAGE_NAME, page(paper))
    return folder / PAGE_NAME


def page(paper: Reproduction) -> str:
    """Return the page as Markdown."""
    parts = [_opening(paper), _headline(paper), _table(paper), _sources(paper), _limits(paper), _models(paper)]
    return "\n\n".join([*parts, _sweep(paper)]) + "\n"


def _opening(paper: Reproduction) -> str:
    specs = [ModelSpec.preset(model) for model in MODELS]
    models = ", ".join(
        f"{spec.name} ({spec.num_parameters / 1e9:.2f}B, {spec.tokens_per_sample} tokens a sample)" for spec in specs
    )
    clusters = "; ".join(f"{name}: {strong} + {weak}" for name, (strong, weak) in CLUSTERS.items())
    link = paper.link
    return f"""# The paper's clusters, simulated

Written by `poplar simulate --preset paper --out docs`; do not edit. **Nothing on this page was measured on GPUs.**
How far the simulator can be trusted: [simulator.md](simulator.md).

What is known of the paper (arXiv:2408.12596) and used here is its abstract: three clusters with six kinds of GPU, and
{PAPER_LOW} to {PAPER_HIGH} times the throughput of other systems for unlike cards. No other figure of the paper is
quoted.

Clusters: {clusters}.

**Assumed:**

- {CARDS_OF_A_KIND} cards of each kind, each kind in a node of its own;
- inside a node the card's own link, between nodes {link.inter_bytes_per_s * 8 / 1e9:.0f} Gbit/s, and
  {link.latency_s * 1e6:.0f} us a message;
- {paper.global_tokens / 1e6:g} M tokens a step, Adam, 16 bit with float32 master weights, no activation checkpointing;
- the shapes of llama-0.5b and bert-1.1b, and all sequence lengths: {models}.

Strategies: `equal` as DeepSpeed splits, `flops` by data sheet as Whale does, `poplar` our reading of the paper, `exact`
this package's default. "Weak alone" and "strong alone" are the {CARDS_OF_A_KIND} cards of one kind without the others,
planned by `exact`."""


def _headline(paper: Reproduction) -> str:
    rows, ranges = [], {}
    for strategy in ("poplar", "exact"):
        everywhere = [gain for over in ("equal", "flops") for gain, _ in paper.gains(over, strategy)]
        ranges[strategy] = f"{min(everywhere):.2f} to {max(everywhere):.2f}"
    for name in CLUSTERS:
        for strategy in ("poplar", "exact"):
            for over in ("equal", "flops"):
                gains = [(gain, cell) for gain, cell in paper.gains(over, strategy) if cell.cluster == name]
                ends = (f"{gain:.2f}x ({_where(cell)})" for gain, cell in (gains[-1], gains[0]))
                rows.append((name, strategy, over, *ends))
    return f"""## Headline

Simulated, `poplar` is {ranges["poplar"]} times as fast as its two rivals here, `exact` {ranges["exact"]}; the abstract
says {PAPER_LOW} to {PAPER_HIGH} of its rivals.

{_markdown(("cluster", "strategy", "over", "least gain", "largest gain"), rows)}

![gains by cluster, model and stage](images/reproduction_gains.svg)"""


def _table(paper: Reproduction) -> str:
    header = (
        "cluster",
        "model",
        "stage",
        "weak alone",
        "strong alone",
        *reversed(STRATEGIES),
        "poplar/equal",
        "poplar/flops",
    )
    rows = []
    for cell in paper.cells:
        speeds = [_speed(cell.speed(strategy)) for strategy in reversed(STRATEGIES)]
        gains = [f"{gain:.2f}x" if (gain := cell.gain(over)) else "-" for over in ("equal", "flops")]
        alone = (_speed(cell.weak_tokens_per_s), _speed(cell.strong_tokens_per_s))
        rows.append((cell.cluster, cell.model, str(cell.zero_stage), *alone, *speeds, *gains))
    return f"""## Every cluster, model and stage

Thousands of tokens a second; "-" does not fit in memory.

{_markdown(header, rows)}

{_better_apart(paper)}"""


def _better_apart(paper: Reproduction) -> str:
    apart = [cell for cell in paper.cells if cell.strong_tokens_per_s > cell.speed("exact") > 0]
    where = "; ".join(f"cluster {cell.cluster}, {_where(cell)}" for cell in apart) or "nowhere"
    return (
        f"The strong cards alone are faster than all cards together: {where}. `exact` gives a slow card less or "
        "nothing, but a card in the group still takes part in collectives and slows a micro-step that it computes in."
    )


def _sources(paper: Reproduction) -> str:
    header = ("cluster", "model", "stage", "step, equal", "step, poplar", "balance", "collectives", "compute", "leads")
    rows = []
    for cell in paper.cells:
        slower, faster = cell.run("equal").prediction, cell.run("poplar").prediction
        if slower is None or faster is None:
            continue
        parts = gain_parts(slower, faster)
        shares = (f"{part / slower.step_s:+.0%}" for part in (parts.balance_s, parts.collective_s, parts.compute_s))
        steps = (f"{slower.step_s:.1f} s", f"{faster.step_s:.1f} s")
        rows.append((cell.cluster, cell.model, str(cell.zero_stage), *steps, *shares, parts.leading()))
    return f"""## Where the gain over `equal` comes from

As shares of the step of `equal`: less waiting of fast cards (balance); less communication that compute does not hide,
by fewer or longer micro-steps (collectives); less compute on average over the cards, by larger micro-batches where
memory allows them and by where samples are computed (compute).

{_markdown(header, rows)}"""


def _limits(paper: Reproduction) -> str:
    rows, ratios = [], []
    for name, (strong, weak) in CLUSTERS.items():
        ratios.append(find_card(strong).relative_speed / find_card(weak).relative_speed)
        sheet = find_card(strong).peak_tflops("fp16") / find_card(weak).peak_tflops("fp16")
        highest = max(gain for gain, cell in paper.gains("equal", "exact") if cell.cluster == name)
        rows.append((name, f"{ratios[-1]:.2f}", f"{sheet:.2f}", f"{(1 + ratios[-1]) / 2:.2f}x", f"{highest:.2f}x"))
    header = ("cluster", "r by the catalogue's rates", "r by data sheet", "most by balance", "largest found (exact)")
    reach = (
        f"out of reach by balance at any number of these cards, as no pair has a ratio above {max(ratios):.2f}"
        if max(ratios) < PAPER_HIGH
        else "within reach of balance where strong cards are many and weak ones few"
    )
    return f"""## Why not {PAPER_HIGH}

With as many strong as weak cards, and r the ratio of their speeds, an equal split runs at the speed of 2 weak cards a
pair and a perfect one at 1 + r: balance alone gives at most (1 + r) / 2. More can come from larger micro-batches, from
fewer collectives, or from a rival that is set up less well than the ones here, which choose their best micro-batch.

{_markdown(header, rows)}

A gain of {PAPER_HIGH} over an equal split is {reach}. Rivals with fixed small micro-batches, slower links, other counts
or other settings, of which the abstract does not tell, could make up the difference; the simulation cannot say which.
Where r is near 1 (A) there is little to balance, as the low end of the abstract's range has it."""


def _models(paper: Reproduction) -> str:
    header = ("cluster", "model", "gain over equal", "largest micro-batch, strong / weak", "speed with it")
    rows = []
    for name, kinds in CLUSTERS.items():
        for model in MODELS:
            cells = [cell for cell in paper.cells if (cell.cluster, cell.model) == (name, model) and cell.gain("equal")]
            gain = sum(cell.gain("equal") or 0.0 for cell in cells) / len(cells)
            sizes, shares = zip(*(_largest(cells[-1], kind) for kind in kinds), strict=True)
            rows.append(
                (
                    name,
                    model,
                    f"{gain:.2f}x",
                    " / ".join(map(str, sizes)),
                    " / ".join(f"{share:.0%}" for share in shares),
                )
            )
    return f"""## Models compared

Public summaries of the paper say that BERT gains more than Llama, and the larger Llama less than the smaller, because
its micro-batches are small. Gains are means over the stages that fit. Micro-batches are those of stage 3, with the
speed that they reach as a share of what ever larger ones approach.

{_markdown(header, rows)}

{_model_findings(paper)}"""


def _model_findings(paper: Reproduction) -> str:
    def gain(cluster: str, model: str) -> float:
        gains = [g for g, cell in paper.gains("equal") if (cell.cluster, cell.model) == (cluster, model)]
        return sum(gains) / len(gains)

    def names(found: Iterable[str]) -> str:
        return ", ".join(found) or "none"

    bert = names(c for c in CLUSTERS if gain(c, "bert-1.1b") > gain(c, "llama-1.1b"))
    small = names(c for c in CLUSTERS if gain(c, "llama-0.5b") > gain(c, "llama-1.1b"))
    return f"""Found: bert-1.1b gains more than llama-1.1b in clusters: {bert}; llama-0.5b gains more than llama-1.1b in
clusters: {small}. The effect is large only where memory leaves a card one or two samples (B): at stages 2 and 3 the
split can then be no finer than one sample a micro-step. Where ten and more fit, cards are close to their best speed
whatever the split, and the gain is that of balance."""


def _sweep(paper: Reproduction) -> str:
    rows = []
    for point in paper.sweep:
        speeds = (_speed(point.tokens_per_s[strategy]) for strategy in STRATEGIES)
        rows.append((f"{CARDS_OF_A_KIND} x {point.fixed} + {point.num_added} x {point.added}", *speeds))
    return f"""## Numbers of cards

{SWEEP_MODEL} in fp16, each strategy at its own best stage; thousands of tokens a second.

{_markdown(("cluster", *STRATEGIES), rows)}

![speed by number of cards](images/reproduction_sweep.svg)"""


def _largest(cell: Cell, kind: str) -> tuple[int, float]:
    """Return the largest micro-batch on a kind of card and the speed that it reaches."""
    run = cell.run("poplar")
    assert run.profile is not None
    size = next(rank.max_micro_batch_size for rank in run.profile.ranks if rank.device == kind)
    one_s, two_s = (compute_s(find_card(kind), run.spec, count, run.profile.precision) for count in (1, 2))
    return size, size * (two_s - one_s) / (one_s + (size - 1) * (two_s - one_s)) if size else 0.0


def _where(cell: Cell) -> str:
    return f"{cell.model}, stage {cell.zero_stage}"


def _speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s / 1e3:.1f}" if tokens_per_s else "-"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
