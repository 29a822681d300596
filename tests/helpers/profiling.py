"""A rank with settable memory and clock, and a recipe whose loss can be told to fail, to be slow, or to take long."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from poplar.config import Recipe
from poplar.device import Device
from poplar.zero.comm import LoopbackComm

WIDTH = 64
HIDDEN = 256
STATE_PARAMETERS = 2 * (WIDTH * HIDDEN + HIDDEN + HIDDEN * WIDTH + WIDTH)


class FakeDevice(Device):
    """A CPU rank with a memory of its own; ``clock`` replaces the time of day; ``alone`` while it is measured alone."""

    is_emulated = True

    def __init__(
        self,
        memory_bytes: int = 1 << 30,
        memory_fraction: float | None = None,
        name: str = "fake-1g",
        clock: Callable[[], float] | None = None,
    ):
        self._memory_bytes = memory_bytes
        super().__init__(memory_fraction)
        self.name = name
        self.device_id = f"{name}:0"
        self.alone = False
        self._clock = clock

    def _read_memory_limit(self) -> int:
        return int(self._memory_bytes * self.memory_fraction)

    def clock_s(self) -> float:
        return super().clock_s() if self._clock is None else self._clock()

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        self.alone = True
        try:
            yield
        finally:
            self.alone = False


class EchoComm(LoopbackComm):
    """A group whose other ranks are just like this one, and say the same."""

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values)] * self.world_size

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.world_size


@dataclass
class ScriptedClock:
    """Seconds that pass only in the loss function: ``seconds_of(size, number of calls with it before)``."""

    seconds_of: Callable[[int, int], float]
    now_s: float = 0.0
    calls: dict[int, int] = field(default_factory=dict)

    def __call__(self) -> float:
        return self.now_s

    def pass_time(self, size: int) -> None:
        number = self.calls.get(size, 0)
        self.calls[size] = number + 1
        self.now_s += self.seconds_of(size, number)


class RaisesInBackward(torch.autograd.Function):
    """Passes its input through; runs ``fail`` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: Callable[[], None]) -> Tensor:
        ctx.fail = fail
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.fail()
        return grad, None


def build_model() -> nn.Module:
    """Return four units, none of which holds half of the model."""
    layers = [nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(2)]
    return nn.Sequential(*layers[0], *layers[1])


def build_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def build_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn((32, WIDTH), generator=generator))


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


def make_recipe(
    before_loss: Callable[[int], None] | None = None,
    in_backward: Callable[[int], None] | None = None,
    **fields: Any,
) -> Recipe:
    """Return a small recipe; the callbacks get the size of the micro-batch."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        size = len(batch[0])
        if before_loss is not None:
            before_loss(size)
        value = mean_square(model, batch)
        return value if in_backward is None else RaisesInBackward.apply(value, lambda: in_backward(size))

    defaults = {"model": build_model, "optimizer": build_adam, "loss": loss, "dataset": build_dataset}
    return Recipe(**{**defaults, **fields})


def out_of_memory_from(smallest: int) -> Callable[[int], None]:
    """Return a callback that runs out of memory from a micro-batch size on."""

    def fail(size: int) -> None:
        if size >= smallest:
            raise torch.OutOfMemoryError(f"tried to allocate {size} too many")

    return fail
