"""Dtypes by parameter, the choice that all cards share, and the loss scale."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from poplar.device import CudaDevice
from poplar.errors import ConfigError, NonFiniteError
from poplar.zero.precision import LossScale, PoplarWarning, resolve_precision

T4, A100, CPU = ("fp32", "fp16"), ("fp32", "fp16", "bf16"), ("fp32",)


# X14: what every card does natively.


@pytest.mark.parametrize(
    ("cards", "choice"),
    [
        ([A100, A100], "bf16"),
        ([A100, T4, A100], "fp16"),
        ([A100, CPU], "fp32"),
        ([("fp32", "bf16"), T4], "fp32"),
        ([], "fp32"),
    ],
)
def test_auto_is_the_best_that_all_cards_have(cards: list[tuple[str, ...]], choice: str) -> None:
    """X14."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_precision("auto", cards).name == choice


@pytest.mark.parametrize(
    ("capability", "choice"), [((6, 1), "fp16"), ((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")]
)
def test_auto_goes_by_capability_and_not_by_emulation(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], choice: str
) -> None:
    """X14: a T4 or V100 whose driver says "bf16 is supported" (it emulates) does not bring it to anybody."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    card = CudaDevice.__new__(CudaDevice)
    card._index, card.vendor = 0, "nvidia"
    assert resolve_precision("auto", [A100, card.native_dtypes()]).name == choice


def test_an_explicit_wish_is_granted_and_the_ranks_that_lack_it_are_named() -> None:
    """X14."""
    with pytest.warns(PoplarWarning, match=r"precision 'bf16': the cards of ranks \[1, 2\] do not compute in it nativ"):
        assert resolve_precision("bf16", [A100, T4, CPU]).name == "bf16"
    with pytest.raises(ConfigError, match="precision must be one of fp32, bf16, fp16, auto; got 'half'"):
        resolve_precision("half", [A100])


@pytest.mark.parametrize(
    ("name", "dtype", "trained", "keep", "compute", "master"),
    [
        ("fp32", torch.float32, True, False, torch.float32, torch.float32),
        ("fp32", torch.float64, True, False, torch.float64, torch.float64),
        ("fp32", torch.bfloat16, True, False, torch.bfloat16, torch.bfloat16),
        ("bf16", torch.float32, True, False, torch.bfloat16, torch.float32),
        ("bf16", torch.bfloat16, True, False, torch.bfloat16, torch.float32),
        ("bf16", torch.float16, True, False, torch.bfloat16, torch.float32),
        ("bf16", torch.float64, True, False, torch.bfloat16, torch.float64),
        ("bf16", torch.float32, True, True, torch.float32, torch.float32),
        ("bf16", torch.float32, False, False, torch.float32, torch.float32),
        ("fp16", torch.float32, True, False, torch.float16, torch.float32),
        ("fp16", torch.int64, False, False, torch.int64, torch.int64),
    ],
)
def test_dtypes_of_a_parameter(
    name: str, dtype: torch.dtype, trained: bool, keep: bool, compute: torch.dtype, master: torch.dtype
) -> None:
    precision = resolve_precision(name, [A100])
    param = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=trained)
    assert precision.compute_dtype(param, keep) == compute
    assert precision.master_dtype(param, compute) == master


# The loss scale.


def test_the_scale_halves_at_once_and_doubles_after_a_calm_time() -> None:
    scale = LossScale(enabled=True, initial=1024.0)
    scale.growth_interval = 3
    for overflow, want in (
        (True, 512), (False, 512), (False, 512), (True, 256), (False, 256), (False, 256), (False, 512), (False, 512),
    ):  # fmt: skip
        scale.update(overflow)
        assert scale.value == want


def test_a_scale_at_its_minimum_ends_the_run_and_one_good_step_forgives() -> None:
    """X05."""
    scale = LossScale(enabled=True, initial=4.0)
    for _ in range(2):
        scale.update(True)
    assert scale.value == 1.0
    for _ in range(scale.max_skips_at_minimum - 1):
        scale.update(True)
    scale.update(False)
    for _ in range(scale.max_skips_at_minimum - 1):
        scale.update(True)
    with pytest.raises(NonFiniteError, match="20 steps in a row overflowed at the smallest loss scale"):
        scale.update(True)
    assert scale.value == 1.0


def test_without_fp16_there_is_no_scale() -> None:
    scale = LossScale(enabled=False)
    for _ in range(100):
        scale.update(True)
    assert scale.value == 1.0
    scale.load_state_dict({"value": 256.0, "calm_steps": 3, "skips_at_minimum": 0})
    assert scale.value == 1.0, "a checkpoint of an fp16 run does not scale another precision"


def test_the_scale_goes_on_where_it_was() -> None:
    scale, other = LossScale(enabled=True, initial=2.0), LossScale(enabled=True)
    scale.growth_interval = other.growth_interval = 3
    for overflow in (True, True, False, False):
        scale.update(overflow)
    other.load_state_dict(scale.state_dict())
    for overflow in (False, True, True):
        scale.update(overflow)
        other.update(overflow)
        assert scale.state_dict() == other.state_dict()
