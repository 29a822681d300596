"""Train a small GPT on bytes with the four-line loop.

torchrun --nproc-per-node 2 examples/train_gpt.py --steps 50
poplar train examples/train_gpt.py:recipe --global-batch-size 32 --steps 50 --emulate v100-16g,t4-16g
"""

from __future__ import annotations

import click
import torch

import poplar
from poplar.recipes.bytes_gpt import BytesGptConfig, bytes_gpt

recipe = bytes_gpt(BytesGptConfig(num_layers=2, width=64, seq_len=64, max_text_bytes=1 << 20))


@click.command()
@click.option("--global-batch-size", default=32, show_default=True, help="Samples of a step, over all ranks.")
@click.option("--steps", default=50, show_default=True, help="Optimizer steps.")
@click.option("--zero-stage", default="auto", show_default=True, help="auto, 0, 1, 2 or 3.")
def main(global_batch_size: int, steps: int, zero_stage: str) -> None:
    """Train a small GPT over the ranks that torchrun starts (one, without it)."""
    torch.manual_seed(0)
    stage = zero_stage if zero_stage == "auto" else int(zero_stage)
    plan = poplar.make_plan(recipe, global_batch_size=global_batch_size, zero_stage=stage)
    model = recipe.model()
    engine = poplar.initialize(model, recipe.optimizer(model), recipe.loss, weight=recipe.weight, plan=plan)
    for step, micro_batches in enumerate(poplar.PlannedLoader(recipe.dataset(), plan, collate=recipe.collate), start=1):
        result = engine.step(micro_batches)
        if engine.comm.rank == 0 and (step % 10 == 0 or step in (1, steps)):
            click.echo(f"step {step}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.3f}")
        if step == steps:
            break
    engine.comm.barrier()


if __name__ == "__main__":
    main()
