"""``poplar simulate`` and ``poplar advise``: tables, JSON, pictures, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from poplar.cli import main
from poplar.plan import Plan

_SMALL = ["--model", "layers=4,width=256,heads=4,vocab=500,seq_len=128", "--global-batch-size", "64"]
_PAIR = ["--cluster", "v100-16g:1,t4-16g:1"]


def _run(*arguments: str) -> Result:
    # The environment is restored afterwards: --cards sets a variable for the ranks.
    return CliRunner(env={"POPLAR_CARDS": ""}).invoke(main, list(arguments), catch_exceptions=False)


def test_the_table_has_every_stage_and_strategy() -> None:
    result = _run("simulate", *_PAIR, *_SMALL)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if line.strip()[:1] in set("0123")]
    assert {(row[0], row[1]) for row in rows} == {
        (str(stage), strategy) for stage in range(4) for strategy in ("exact", "poplar", "flops", "equal")
    }
    assert all(row[3] == "1.00x" for row in rows if row[1] == "equal")
    assert "simulated, nothing was measured here" in result.output and "fastest: stage" in result.output


def test_json_is_the_same_runs() -> None:
    result = _run("simulate", *_PAIR, *_SMALL, "--zero-stage", "2", "--strategy", "exact,equal", "--json")
    runs = json.loads(result.output)
    assert [(run["zero_stage"], run["strategy"]) for run in runs] == [(2, "exact"), (2, "equal")]
    for run in runs:
        assert run["cluster"] == {"v100-16g": 1, "t4-16g": 1} and run["fits"]
        assert sum(sum(sizes) for sizes in run["micro_batch_sizes"].values()) == 64
        assert run["samples_per_s"] == pytest.approx(64 / run["step_s"])
        assert run["tokens_per_s"] == pytest.approx(128 * run["samples_per_s"])


def test_what_does_not_fit_is_told_beside_what_does() -> None:
    result = _run("simulate", "--cluster", "v100:4,t4:4", "--model", "llama-1.1b", "--global-tokens", "100k")
    assert result.exit_code == 0
    assert "stage 0: llama-1.1b at stage 0 needs 18.4 GiB of model state on each v100-16g" in result.output


def test_plan_and_picture_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan_path, pictures = (
        tmp_path / "plan.json",
        [tmp_path / "a" / name for name in ("one.svg", "two.svg", "three.png")],
    )
    for picture in pictures:
        result = _run("simulate", *_PAIR, *_SMALL, "--save-plan", str(plan_path), "--picture", str(picture))
        assert result.exit_code == 0, result.output
    assert Plan.load(plan_path).global_batch_size == 64
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert pictures[2].read_bytes().startswith(b"\x89PNG")
    bad = _run("simulate", *_PAIR, *_SMALL, "--picture", str(tmp_path / "four.nothing"))
    assert bad.exit_code == 1 and "cannot draw into" in bad.output


def test_links_change_the_outcome() -> None:
    def speed(link: str) -> float:
        result = _run("simulate", *_PAIR, *_SMALL, "--zero-stage", "3", "--strategy", "exact", "--link", link, "--json")
        return json.loads(result.output)[0]["tokens_per_s"]

    assert speed("inter=0.1") < speed("inter=1") < speed("inter=25,latency-us=1")


def test_own_cards_can_be_simulated(tmp_path: Path) -> None:
    card = {"name": "x-8g", "memory_gib": 8, "memory_bandwidth_gb_per_s": 300, "fp32_tflops": 10, "pcie_gb_per_s": 16}
    path = tmp_path / "cards.json"
    path.write_text(json.dumps({"cards": [card]}))
    arguments = ["simulate", "--cluster", "x-8g:2,t4:1", *_SMALL]
    result = _run(*arguments, "--cards", str(path))
    assert result.exit_code == 0 and "x-8g" in result.output and "fp32" in result.output
    assert _run(*arguments).exit_code == 1


def test_a_recipes_own_model_can_be_simulated() -> None:
    arguments = ["simulate", *_PAIR, "--model", "poplar.recipes.bytes_gpt:recipe", "--global-batch-size", "64"]
    result = _run(*arguments, "--zero-stage", "1", "--strategy", "exact", "--json")
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.output)
    assert run["tokens_per_s"] == pytest.approx(128 * run["samples_per_s"])


def test_advice_as_text_and_json() -> None:
    arguments = ["advise", *_PAIR, *_SMALL, "--consider", "a100,rtx3090"]
    text, data = _run(*arguments), json.loads(_run(*arguments, "--json").output)
    assert text.exit_code == 0, text.output
    for expected in ("v100-16g", "t4-16g", "a100-80g", "rtx3090-24g", "binds: ", "one more brings"):
        assert expected in text.output
    assert [kind["name"] for kind in data["kinds"]] == ["v100-16g", "t4-16g"]
    assert [entry["card"] for entry in data["considered"]] == ["a100-80g", "rtx3090-24g"]
    assert data["binds"] and data["best"]["fits"]


def test_the_papers_clusters_as_page_and_json(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = _run("simulate", "--preset", "paper", "--out", str(tmp_path))
    assert written.exit_code == 0, written.output
    page = (tmp_path / "reproduction.md").read_text()
    for name in ("gains", "sweep"):
        assert (tmp_path / "images" / f"reproduction_{name}.svg").exists()
        assert f"(images/reproduction_{name}.svg)" in page
    assert "**Assumed:**" in page and "1.02 to 3.92" in page
    data = json.loads(_run("simulate", "--preset", "paper", "--json").output)
    assert len(data["cells"]) == 36 and len(data["sweep"]) == 10
    assert _run("simulate", "--preset", "paper").output == page


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["simulate"], 2, "--cluster and --model are needed"),
        (["simulate", *_PAIR, "--model", "llama-9b"], 1, "unknown model 'llama-9b'; known are"),
        (["simulate", *_PAIR, "--model", "nowhere:recipe"], 1, "there is no module 'nowhere'"),
        (["simulate", "--cluster", "v100-15g:2", *_SMALL], 1, "did you mean 'v100-16g'"),
        (["simulate", "--cluster", "v100:0", *_SMALL], 1, "must be 1 or more"),
        (["simulate", *_PAIR, *_SMALL, "--zero-stage", "4"], 1, "--zero-stage must be all, 0, 1, 2 or 3"),
        (["simulate", *_PAIR, *_SMALL, "--strategy", "best"], 1, "strategy must be one of exact"),
        (["simulate", *_PAIR, *_SMALL, "--link", "bus=3"], 1, "expected inter="),
        (["simulate", *_PAIR, *_SMALL, "--precision", "bf16"], 1, "v100-16g does not compute in bfloat16"),
        (["simulate", *_PAIR, *_SMALL, "--global-tokens", "2M"], 2, "not both"),
        (["simulate", *_PAIR, "--model", "gpt2", "--global-tokens", "-3"], 1, "tokens must be a number from 1"),
        (["simulate", *_PAIR, "--model", "gpt2", "--global-batch-size", "0"], 1, "a global batch of 1 to"),
        (["simulate", *_PAIR, "--model", "gpt2", "--seq-len", "0"], 1, "seq_len must be an integer from 1"),
        (["simulate", *_PAIR, "--model", "llama-7b"], 1, "llama-7b fits nowhere on v100-16g:1,t4-16g:1. stage 0:"),
        (["simulate", *_PAIR, *_SMALL, "--cards", "absent.json"], 1, "cannot read the cards"),
        (["simulate", "--preset", "paper", *_PAIR], 2, "--preset paper sets cluster"),
        (["simulate", "--preset", "paper", "--zero-stage", "1"], 2, "--preset paper runs every stage"),
        (["simulate", *_PAIR, *_SMALL, "--out", "x"], 2, "--out belongs to --preset"),
        (["advise", *_PAIR, "--model", "llama-7b"], 1, "llama-7b fits at no stage"),
        (["advise", *_PAIR, *_SMALL, "--consider", "gtx"], 1, "unknown card 'gtx'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], exit_code: int, message: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == exit_code, result.output
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1 and "Traceback" not in result.output
