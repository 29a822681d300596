"""Give every rank its batches by hand: no profile, no search.

torchrun --nproc-per-node 2 examples/manual_plan.py --micro-batch-sizes 6,2
torchrun --nproc-per-node 2 examples/manual_plan.py --micro-batch-sizes 3+3,2 --zero-stage 1
"""

from __future__ import annotations

import os

import click
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import poplar
from poplar.fit_config import parse_micro_batch_sizes


def mean_squared_error(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean over the samples of a batch, whatever its size."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


@click.command()
@click.option("--micro-batch-sizes", help="Sizes by rank, as 6,2 or 3+3,2.  [default: 6 on rank 0, 2 on the others]")
@click.option("--zero-stage", type=click.IntRange(0, 3), default=0, show_default=True, help="ZeRO stage.")
@click.option("--epochs", type=click.IntRange(min=1), default=3, show_default=True, help="Passes over the data.")
def main(micro_batch_sizes: str | None, zero_stage: int, epochs: int) -> None:
    """Fit a line with batches of your own for every rank (one, without torchrun)."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = parse_micro_batch_sizes(micro_batch_sizes) if micro_batch_sizes else [6] + [2] * (world_size - 1)
    plan = poplar.Plan.manual(sizes, zero_stage=zero_stage)
    # Before anything is built: a list for another number of ranks is refused by all of them at once.
    plan.check_cluster(world_size)
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs @ torch.arange(8.0).unsqueeze(1)
    model = nn.Linear(8, 1)
    engine = poplar.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_squared_error, plan=plan)
    loader = poplar.PlannedLoader(TensorDataset(inputs, targets), plan)
    for epoch in range(1, epochs + 1):
        for micro_batches in loader:
            result = engine.step(micro_batches)
        if engine.comm.rank == 0:
            click.echo(f"epoch {epoch}: loss {result.loss:.3g} over {plan.global_batch_size} samples a step")
    engine.comm.barrier()


if __name__ == "__main__":
    main()
