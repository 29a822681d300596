"""Curves: through the points, positive, non-decreasing, never read beyond what ran."""

from __future__ import annotations

import csv
import dataclasses
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import CubicSpline

from poplar.curve import curve_of, fit_curve, isotonic
from poplar.errors import ConfigError
from poplar.plan import RankProfile

_SECONDS = st.floats(1e-4, 100.0)
_POINTS = st.dictionaries(st.integers(1, 200), _SECONDS, min_size=1, max_size=8).map(lambda d: tuple(sorted(d.items())))


@settings(max_examples=150, deadline=None)
@given(_POINTS, st.integers(0, 60))
def test_any_points_give_positive_non_decreasing_times(points, more):
    maximum = points[-1][0] + more
    curve = fit_curve(points, maximum)
    seconds = curve.seconds_array()
    assert seconds.shape == (maximum + 1,) and seconds[0] == 0.0
    assert np.isfinite(seconds).all() and (seconds[1:] > 0).all() and (np.diff(seconds) >= 0).all()
    assert curve.seconds(maximum) == seconds[-1]


@settings(max_examples=60, deadline=None)
@given(_POINTS, st.floats(0.0, 200.0))
def test_the_largest_batch_within_a_time_inverts_the_curve(points, budget_s):
    curve = fit_curve(points)
    size = curve.largest_within(budget_s)
    assert curve.seconds(size) <= budget_s
    assert size == curve.max_micro_batch_size or curve.seconds(size + 1) > budget_s


def test_smooth_points_get_the_natural_cubic_spline():
    sizes = np.array([1, 2, 4, 8, 16])
    times = 0.01 + 0.02 * sizes**1.1
    curve = fit_curve(zip(sizes.tolist(), times.tolist(), strict=True))
    assert (curve.method, curve.note) == ("natural cubic spline", "")
    expected = CubicSpline(sizes, times, bc_type="natural")(np.arange(1, 17))
    np.testing.assert_allclose(curve.seconds_array()[1:], expected, rtol=1e-12)


def test_a_spline_that_would_swing_is_replaced_and_said():
    """P14: steep, then flat knots make a cubic spline overshoot and fall."""
    points = ((1, 0.1), (2, 1.0), (3, 1.01), (20, 1.02))
    sizes, times = zip(*points, strict=True)
    assert (np.diff(CubicSpline(sizes, times, bc_type="natural")(np.arange(1, 21))) < -0.01).any()
    curve = fit_curve(points)
    assert curve.method == "pchip" and "PCHIP" in curve.note
    assert [curve.seconds(size) for size in sizes] == pytest.approx(times)
    assert curve.seconds_array().max() == pytest.approx(1.02)


def test_a_spline_that_would_go_below_zero_is_replaced():
    """P14: the spline through these is non-decreasing nowhere near size 2, and negative there."""
    points = ((1, 1e-3), (8, 1.1e-3), (9, 5.0), (10, 10.0))
    assert CubicSpline(*zip(*points, strict=True), bc_type="natural")(np.arange(1, 9)).min() < 0
    curve = fit_curve(points)
    assert curve.method == "pchip" and curve.seconds_array()[1:].min() == pytest.approx(1e-3)


def test_nothing_is_read_beyond_the_largest_batch_that_ran():
    """P15."""
    curve = fit_curve(((1, 0.1), (2, 0.2), (3, 0.3)))
    for size in (4, 50, -1):
        with pytest.raises(ConfigError, match=f"from 0 to 3, got {size}"):
            curve.seconds(size)
    assert curve.largest_within(1e9) == 3


def test_one_and_two_and_three_points():
    """P15: linear below the smallest measured size; a batch is never cheaper per sample than the smallest measured."""
    one = fit_curve(((4, 0.8),))
    assert one.method == "proportional" and one.seconds_array() == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])
    two = fit_curve(((4, 0.5), (8, 0.9)))
    assert two.method == "line" and two.seconds_array() == pytest.approx([0.0] + [0.1 + 0.1 * n for n in range(1, 9)])
    steep = fit_curve(((4, 0.4), (5, 1.4)))
    assert steep.seconds_array() == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 1.4])
    three = fit_curve(((1, 0.2), (2, 0.3), (3, 0.4)))
    assert three.method == "natural cubic spline" and three.seconds_array() == pytest.approx([0.0, 0.2, 0.3, 0.4])
    none = fit_curve(())
    assert none.max_micro_batch_size == 0 and none.largest_within(1.0) == 0 and none.seconds(0) == 0.0


def test_between_the_largest_timed_batch_and_the_largest_that_ran_the_curve_goes_on_straight():
    curve = fit_curve(((1, 0.120), (2, 0.215), (4, 0.420)), 5)
    assert curve.seconds(5) == pytest.approx(0.420 + 0.205 / 2)
    assert "above 4" in curve.note
    flat_end = fit_curve(((1, 0.1), (8, 0.8), (9, 0.8)), 10)
    assert flat_end.seconds(10) == pytest.approx(0.8 + 0.7 / 8)
    flat = fit_curve(((8, 0.8), (16, 0.8)), 32)
    assert flat.seconds(32) == pytest.approx(1.6)
    lower = fit_curve(((1, 0.1), (8, 0.8)), 4)
    assert lower.max_micro_batch_size == 4 and lower.seconds(4) == pytest.approx(0.4)


_MEASURED = Path(__file__).resolve().parents[3] / "shared" / "data" / "layer_times.csv"


@pytest.mark.skipif(not _MEASURED.is_file(), reason=f"no public measurements at {_MEASURED}")
def test_curves_of_real_cards_predict_the_sizes_that_they_did_not_see():
    """benchmarks/public_curves.py tells more of these measurements."""
    cards = defaultdict(dict)
    with _MEASURED.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = (row["dtype"], row["model"], row["gpu"], row["seq_len"])
            seconds = (float(row["forward_ms_per_layer"]) + float(row["backward_ms_per_layer"])) / 1e3
            cards[key][int(row["micro_batch_size"])] = seconds
    errors = []
    for key, times in cards.items():
        knots = {size: times[size] for size in (1, 2, 4, 8, 16) if size in times}
        curve = fit_curve(knots.items())
        assert (curve.seconds_array()[1:] > 0).all() and (np.diff(curve.seconds_array()) >= 0).all()
        if key[0] == "float16":
            inside = [size for size in times if size not in knots and size < curve.max_micro_batch_size]
            errors += [abs(curve.seconds(size) / times[size] - 1) for size in inside]
    assert len(errors) > 400 and np.mean(errors) < 0.015


def test_repeated_sizes_count_with_their_median():
    curve = fit_curve([(2, 0.2), (1, 0.1), (2, 9.0), (2, 0.21), (1, 0.1)])
    assert curve.seconds_array() == pytest.approx([0.0, 0.1, 0.21])


def test_a_wild_first_measurement_moves_its_neighbours_little():
    """P12: a first call a hundred times slower than the rest."""
    curve = fit_curve(((1, 10.0), (2, 0.2), (4, 0.4), (8, 0.8), (16, 1.6)))
    assert "smoothed (at sizes 1, 2" in curve.note
    assert curve.seconds(16) == pytest.approx(1.6) and curve.seconds(1) <= 0.4


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.1, 10.0), max_size=8))
def test_isotonic_is_sorted_keeps_sorted_input_and_stays_in_range(values):
    fitted = isotonic(values)
    assert fitted == sorted(fitted) and len(fitted) == len(values)
    assert isotonic(sorted(values)) == sorted(values)
    assert not values or (min(values) <= fitted[0] and fitted[-1] <= max(values))


def test_thirty_percent_of_noise_keeps_times_near_the_truth():
    generator = np.random.default_rng(0)
    sizes = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
    truth = 0.05 + 0.01 * np.arange(33)
    for _ in range(50):
        noisy = truth[sizes] * generator.uniform(0.7, 1.3, len(sizes))
        curve = fit_curve(zip(sizes.tolist(), noisy.tolist(), strict=True))
        ratio = curve.seconds_array()[1:] / truth[1:]
        assert ratio.min() > 0.6 and ratio.max() < 1.45


def _noisy(points, spreads):
    return RankProfile(device="card", points=points, max_micro_batch_size=points[-1][0], point_spreads=spreads)


def test_a_point_that_noise_made_fast_is_not_planned_with():
    """Sizes 1 to 16 on a line, but 4 measured a fifth too fast in runs that disagree by 40%."""
    points = tuple((n, (0.01 + 0.01 * n) * (0.8 if n == 4 else 1.0)) for n in (1, 2, 4, 8, 16))
    exact = tuple((n, 0.0) for n, _ in points)
    doubtful = tuple((n, 0.4 if n == 4 else 0.0) for n, _ in points)
    assert curve_of(_noisy(points, exact)).seconds(4) == curve_of(_noisy(points, ())).seconds(4) == points[2][1]
    steadied = curve_of(_noisy(points, doubtful))
    assert points[2][1] * 1.1 < steadied.seconds(4) <= points[2][1] * 1.2 + 1e-12
    assert steadied.seconds(16) == pytest.approx(points[4][1])


@given(
    st.lists(st.tuples(st.floats(1e-4, 1.0), st.floats(0.0, 3.0)), min_size=1, max_size=7),
    st.integers(0, 40),
)
def test_spreads_of_any_size_keep_curves_safe(measured, more):
    points = tuple((2**place, seconds) for place, (seconds, _) in enumerate(measured))
    spreads = tuple((2**place, spread) for place, (_, spread) in enumerate(measured))
    rank = dataclasses.replace(_noisy(points, spreads), max_micro_batch_size=points[-1][0] + more)
    seconds = curve_of(rank).seconds_array()
    assert np.isfinite(seconds).all() and (seconds[1:] > 0).all() and (np.diff(seconds) >= 0).all()


def test_equal_profiles_share_one_curve():
    ranks = [RankProfile(device=f"card{i}", points=((1, 0.1), (4, 0.3)), max_micro_batch_size=4) for i in range(3)]
    assert curve_of(ranks[0]) is curve_of(ranks[1]) is curve_of(ranks[2])
    with pytest.raises(ValueError, match="read-only"):
        curve_of(ranks[0]).seconds_array()[1] = 0.0


@pytest.mark.parametrize("points", [((0, 0.1),), ((1, 0.0),), ((1, float("nan")),), ((1, float("inf")),), ((1, -0.1),)])
def test_points_that_cannot_be_are_refused(points):
    with pytest.raises(ConfigError, match="a point needs"):
        fit_curve(points)


def test_a_maximum_without_points_is_refused():
    with pytest.raises(ConfigError, match="cannot be fitted"):
        fit_curve((), 4)
