"""Pictures: as many boxes, lines and labels as there is to show, as SVG that loads nothing."""

from __future__ import annotations

import re

import pytest

from poplar.allocator import allocate
from poplar.plan import ClusterProfile, Plan, RankProfile

pytest.importorskip("matplotlib")

from poplar import pictures  # noqa: E402  # what needs matplotlib comes after the check for it


def _rank(device, scale, maximum=4, **fields):
    points = ((1, 0.1 * scale), (maximum, 0.3 * scale))
    return RankProfile(device=device, points=points, max_micro_batch_size=maximum, **fields)


def _profile(zero_stage=0):
    memory = {"memory_points": ((1, 3 << 20), (4, 9 << 20)), "state_bytes": 1 << 20, "memory_limit_bytes": 16 << 20}
    fast = _rank("v100-16g", 1.0, point_spreads=((1, 0.1), (4, 0.02)), **memory)
    return ClusterProfile(
        zero_stage=zero_stage,
        ranks=(fast, fast, _rank("t4 <&$x$>", 3.0), RankProfile(device="l4", points=(), max_micro_batch_size=0)),
        micro_step_collective_s=0.01 if zero_stage >= 2 else 0.0,
        step_collective_s=0.02,
    )


def _texts(figure):
    svg = pictures.svg_text(figure)
    assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>")
    assert set(re.findall(r"https?://[^\"' <]+", svg)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


def test_curves_have_a_line_a_card_and_points_with_their_spreads():
    figure = pictures.draw_curves(_profile())
    [axes] = figure.axes
    labels = ["v100-16g (ranks 0-1)", "t4 <&$x$> (rank 2)", "l4 (rank 3): no batch fits"]
    assert len(axes.get_legend().get_texts()) == 3
    assert len(axes.containers) == 2  # points with error bars: the two cards alike have theirs once
    texts = _texts(figure)
    for label in labels:
        assert label.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in texts


@pytest.mark.parametrize(("zero_stage", "num_idle", "num_collectives"), [(0, 2, 4), (2, 3 + 2, 3 * 4)])
def test_a_timeline_shows_micro_steps_collectives_and_waiting(zero_stage, num_idle, num_collectives):
    """Stage 0: idle and collectives at the end of the step; stage 2: after every micro-step too."""
    plan = Plan.manual([[3, 2], [3, 2], [1, 0], [0, 0]], zero_stage=zero_stage)
    figure = pictures.draw_timeline(_profile(zero_stage), None, plan)
    assert len(figure.axes[0].patches) == 5 + num_idle + num_collectives
    sizes = [text for text in _texts(figure) if text in ("1", "2", "3")]
    assert sorted(sizes) == ["1", "2", "2", "3", "3"]


def test_before_and_after_share_a_time_axis():
    profile = ClusterProfile(zero_stage=0, ranks=(_rank("v100-16g", 1.0), _rank("t4-16g", 3.0)))
    before, after = allocate(profile, 16, "equal"), allocate(profile, 16)
    figure = pictures.draw_timeline(profile, before, after)
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim()
    assert above.get_title("left").startswith("equal split: ") and below.get_title("left").startswith("this plan: ")
    assert {"rank 0, v100-16g", "rank 1, t4-16g", "idle", "collectives", "optimizer"} <= set(_texts(figure))


def test_of_many_ranks_those_alike_share_a_row():
    ranks = (_rank("v100-16g", 1.0),) * 30 + (_rank("t4-16g", 3.0),) * 10
    profile = ClusterProfile(zero_stage=0, ranks=ranks)
    plan = Plan.manual([4] * 30 + [1] * 10)
    for figure in (pictures.draw_timeline(profile, None, plan), pictures.draw_memory(profile, plan)):
        assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
            "ranks 0-29, v100-16g",
            "ranks 30-39, t4-16g",
        ]


def test_memory_shows_state_peak_and_limit_where_they_are_known():
    figure = pictures.draw_memory(_profile(), Plan.manual([4, 1, 1, 0]))
    [axes] = figure.axes
    assert len(axes.patches) == 4 and len(axes.lines) == 2
    texts = _texts(figure)
    assert "9.0 MiB at 4" in texts and "3.0 MiB at 1" in texts and texts.count("not measured") == 2


def test_a_figure_goes_to_a_file_too(tmp_path):
    for name in ("a.svg", "b.svg", "c.png"):
        pictures.save_figure(pictures.draw_curves(_profile()), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
