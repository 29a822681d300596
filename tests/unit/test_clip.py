"""The norm over any cut of the gradient is the norm of the whole; clipping is PyTorch's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poplar.engine import StepSettings
from poplar.errors import ConfigError
from poplar.zero.clip import check_norm_type, clip_coefficient, global_norm, local_norm_part

NORM_TYPES = (1.0, 2.0, 3.0, math.inf)
quick = settings(max_examples=60, deadline=None)


@quick
@given(
    values=st.lists(st.floats(-1e6, 1e6), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=5),
    norm_type=st.sampled_from(NORM_TYPES),
)
def test_parts_of_any_cut_give_the_whole_norm(values: list[float], cuts: list[int], norm_type: float) -> None:
    """X06, X10: sums over owners, not means of norms; owners of nothing add nothing."""
    whole = torch.tensor(values, dtype=torch.float64)
    ends = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [local_norm_part([whole[a:b]], norm_type) for a, b in zip(ends, ends[1:], strict=False)]
    want = torch.linalg.vector_norm(whole, norm_type).item() if values else 0.0
    assert global_norm(parts, norm_type) == pytest.approx(want, rel=1e-12, abs=1e-90)  # powers of less underflow


def test_float32_parts_are_put_together_in_float64() -> None:
    """A thousand small squares beside 2^24: each alone would be lost in float32."""
    grads = [torch.tensor([4096.0])] + [torch.tensor([0.7])] * 1000
    want = math.sqrt(2**24 + 490)
    assert global_norm([local_norm_part(grads, 2.0)], 2.0) == pytest.approx(want, rel=1e-9)
    assert global_norm([local_norm_part([grad], 2.0) for grad in grads], 2.0) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_shows_in_the_norm_of_every_rank(norm_type: float, bad: float) -> None:
    """X01."""
    parts = [local_norm_part([torch.tensor([1.0, value])], norm_type) for value in (2.0, bad, 3.0)]
    assert not math.isfinite(global_norm(parts, norm_type))
    assert math.isnan(global_norm(parts, norm_type)) == math.isnan(bad)


@quick
@given(
    values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=9),
    max_norm=st.sampled_from([1e-3, 1.0, 50.0]),
    norm_type=st.sampled_from([2.0, math.inf]),
)
def test_the_coefficient_is_that_of_pytorch(values: list[float], max_norm: float, norm_type: float) -> None:
    param = torch.nn.Parameter(torch.zeros(len(values), dtype=torch.float64))
    param.grad = torch.tensor(values, dtype=torch.float64)
    before = param.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_([param], max_norm, norm_type).item()
    torch.testing.assert_close(param.grad, before * clip_coefficient(norm, max_norm), rtol=1e-12, atol=0.0)


def test_nothing_is_clipped_below_the_limit_or_without_one() -> None:
    assert (
        clip_coefficient(0.5, 1.0) == 1.0 and clip_coefficient(1e9, None) == 1.0 and clip_coefficient(0.0, 1.0) == 1.0
    )


@pytest.mark.parametrize("norm_type", [0, -1.0, math.nan, "two", None])
def test_a_norm_that_is_none_is_refused(norm_type: object) -> None:
    with pytest.raises(ConfigError, match="norm_type must be a number above 0, or inf"):
        check_norm_type(norm_type)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="norm_type"):
        StepSettings(norm_type=norm_type)  # type: ignore[arg-type]
    assert check_norm_type("inf") == math.inf  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_grad_norm", "max_grad_value"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_limits_must_be_above_zero(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be above 0, or None"):
        StepSettings(**{name: value})
