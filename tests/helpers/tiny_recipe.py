"""Small recipes for tests of whole runs; also loaded by file name."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from poplar.config import Recipe

NUM_SAMPLES = 44


class Regressor(nn.Module):
    """Two layers and dropout; remembers the dropout masks that it drew."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def dataset(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num_samples, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) / 2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def fails_on_rank_1(model: nn.Module, batch: list[Tensor]) -> Tensor:
    if os.environ.get("RANK") == "1":
        raise ValueError("the loss is broken here")
    return loss(model, batch)


class NoParameters(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True)


def sgd_of_nothing(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


recipe = Recipe(
    model=Regressor,
    optimizer=sgd,
    loss=loss,
    dataset=dataset,
    eval_dataset=lambda: dataset(7),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
)
without_schedule = Recipe(model=Regressor, optimizer=sgd, loss=loss, dataset=dataset, eval_dataset=lambda: dataset(7))
broken_loss = Recipe(model=Regressor, optimizer=sgd, loss=fails_on_rank_1, dataset=dataset)
no_parameters = Recipe(model=NoParameters, optimizer=sgd_of_nothing, loss=loss, dataset=dataset)
