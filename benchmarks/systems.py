"""Every system that trains the model: the same work behind one interface.

    local                   no communication: the limit of the same work
    ddp, ddp-view           DistributedDataParallel; -view: gradients are views of its buckets      stage 0
    zro, zro-view           ZeroRedundancyOptimizer under DDP; -view: and parameters are views      stage 1
    fsdp2-z2                fully_shard, parameters kept after forward                              stage 2
    fsdp2                   fully_shard                                                             stage 3
    ds1, ds2, ds3           DeepSpeed, where it is installed                                        stages 1 to 3
    poplar-z0 ... -z3       this package                                                            stages 0 to 3
    poplar-z0-gloo ...      the same, every byte through gloo, as between hosts                     stages 0 to 3

Mixed precision ("bf16") is each system's usual way: autocast over float32 weights (local, DDP and what sits on it),
FSDP2's MixedPrecisionPolicy and DeepSpeed's and Poplar's own, with float32 masters.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpt import GPT, MicroBatch, Workload, gpt_loss

STAGE_OF = {
    "ddp": 0,
    "ddp-view": 0,
    "zro": 1,
    "zro-view": 1,
    "ds1": 1,
    "fsdp2-z2": 2,
    "ds2": 2,
    "fsdp2": 3,
    "ds3": 3,
    "poplar-z0": 0,
    "poplar-z1": 1,
    "poplar-z2": 2,
    "poplar-z3": 3,
    "poplar-z0-gloo": 0,
    "poplar-z1-gloo": 1,
    "poplar-z2-gloo": 2,
    "poplar-z3-gloo": 3,
}
"""ZeRO stage of each system that communicates."""


def installed_systems() -> list[str]:
    """Return the names of all systems that can run here, ``local`` first."""
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    return ["local", *(name for name in STAGE_OF if has_deepspeed or not name.startswith("ds"))]


def checked_systems(text: str) -> list[str]:
    """Return the names in ``text``, which has commas between them.

    Raises:
        click.ClickException: one of them cannot run here.
    """
    names, known = text.split(","), installed_systems()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.ClickException(f"cannot run {', '.join(unknown)}; here are {', '.join(known)}")
    return names


@dataclass(frozen=True, kw_only=True)
class System:
    """A model under one system's care."""

    name: str
    step: Callable[[Sequence[MicroBatch]], float]
    """Take one optimizer step over this rank's micro-batches; returns their mean loss (Poplar: over all ranks)."""
    finish: Callable[[], None]
    """Wait for everything that steps have left under way."""
    close: Callable[[], None] = lambda: None
    engine: Any = None
    """Poplar's engine."""

    @property
    def shared_memory_bytes(self) -> int:
        """Bytes that this rank has sent so far without a socket."""
        return getattr(self.engine.comm, "shared_memory_bytes", 0) if self.engine is not None else 0


def build(name: str, workload: Workload, accumulation: int = 1, device: torch.device | None = None) -> System:
    """Put a new model under the care of the system called ``name``.

    Args:
        accumulation: micro-batches of a step, which DeepSpeed has to know beforehand.

    Collective: all systems but ``local``.
    """
    device = device or torch.device("cpu")
    model = workload.build_model().to(device)
    if name == "local":
        return _plain(name, workload, model, workload.adamw(model.parameters()), device)
    if name.startswith(("ddp", "zro")):
        return _ddp(name, workload, model, device)
    if name.startswith("fsdp2"):
        return _fsdp2(name, workload, model, device)
    if name.startswith("ds"):
        return _deepspeed(name, workload, model, device, accumulation)
    return _poplar(name, workload, model, device)


def _waiter(device: torch.device) -> Callable[[], None]:
    # On CPU, all of these systems have waited for their collectives when a step returns.
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def _plain(
    name: str,
    workload: Workload,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> System:
    """Train by the usual loop; ``no_sync`` is entered around all micro-batches but the last."""

    def step(micro_batches: Sequence[MicroBatch]) -> float:
        total = torch.zeros((), device=device)
        for index, (x, y) in enumerate(micro_batches):
            with no_sync() if index < len(micro_batches) - 1 else contextlib.nullcontext():
                with workload.autocast(device):
                    loss = model(x, y) / len(micro_batches)
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return System(name=name, step=step, finish=_waiter(device))


def _ddp(name: str, workload: Workload, model: nn.Module, device: torch.device) -> System:
    is_view = name.endswith("-view")
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=is_view)
    optimizer: torch.optim.Optimizer
    if name.startswith("zro"):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=is_view,
            **workload.adamw_settings(),
        )
    else:
        optimizer = workload.adamw(wrapped.parameters())
    return _plain(name, workload, wrapped, optimizer, device, wrapped.no_sync)


def _fsdp2(name: str, workload: Workload, model: GPT, device: torch.device) -> System:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "reshard_after_forward": name == "fsdp2",
    }
    if workload.precision == "bf16":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    # Its mixed precision casts by itself: no autocast.
    plain = Workload(model=workload.model, optimizer=workload.optimizer)
    return _plain(name, plain, model, workload.adamw(model.parameters()), device)


def _deepspeed(name: str, workload: Workload, model: nn.Module, device: torch.device, accumulation: int) -> System:
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist.get_backend(), verbose=False)
    # Its default buckets of 2 GB are taken whole, however small the model is.
    num_params = sum(param.numel() for param in model.parameters())
    buckets = {key: min(500_000_000, num_params) for key in ("reduce_bucket_size", "allgather_bucket_size")}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": int(name[2]), **buckets},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if workload.precision == "bf16":
        config["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=workload.adamw(model.parameters()), config=config)

    def step(micro_batches: Sequence[MicroBatch]) -> float:
        assert len(micro_batches) == accumulation
        total = torch.zeros((), device=device)
        for x, y in micro_batches:
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(micro_batches)
        return total.item()

    return System(name=name, step=step, finish=_waiter(device), close=engine.destroy)


def _poplar(name: str, workload: Workload, model: nn.Module, device: torch.device) -> System:
    import poplar

    with through_gloo(name.endswith("-gloo")):
        engine = poplar.initialize(
            model,
            workload.adamw(model.parameters()),
            gpt_loss,
            zero_stage=STAGE_OF[name],
            precision=workload.precision,
        )
    return poplar_system(name, engine)


@contextlib.contextmanager
def through_gloo(wanted: bool) -> Iterator[None]:
    """Let Poplar's communicators that are made inside send through gloo, or take the fastest way."""
    from poplar.zero.shared_memory import DISABLED_BY

    before = os.environ.get(DISABLED_BY, "")
    os.environ[DISABLED_BY] = "1" if wanted else "0"
    try:
        yield
    finally:
        os.environ[DISABLED_BY] = before


def poplar_system(name: str, engine: Any) -> System:
    """Wrap an engine that has been made already."""
    wait = _waiter(engine.device.torch_device)

    def finish() -> None:
        if engine.zero_stage < 3:
            # What a step may have left under way are parameters on their way to other ranks.
            with engine.unsharded():
                pass
        wait()

    return System(
        name=name, step=lambda batches: engine.step(batches).loss, finish=finish, close=engine.close, engine=engine
    )
