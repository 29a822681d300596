"""Save on some ranks, load on others: any stage, world size, split and shard ratio on either side."""

from __future__ import annotations

import random
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR

import poplar
from poplar.checkpoint import export_model, load_checkpoint, save_checkpoint
from poplar.config import ZERO_STAGES
from poplar.engine import Engine
from poplar.errors import CheckpointError, CommunicationError, ConfigError
from poplar.loader import PlannedLoader
from poplar.plan import Plan
from poplar.zero.comm import ProcessGroupComm
from poplar.zero.debug import CheckedComm
from poplar.zero.hybrid import HybridComm
from poplar.zero.precision import PoplarWarning
from tests.helpers.models import adamw_two_groups, cross_entropy, num_labels, sgd
from tests.helpers.spawn import run_ranks
from tests.helpers.zoo import VOCABULARY, WIDTH, Block, LowRank, OneElement

TOLERANCE = 1e-12
NUM_SAMPLES = 23
SIZES = {1: ((9,),), 2: ((2, 0), (3, 4)), 3: ((4, 1), (0, 1), (3, 0))}
"""By world size: micro-batches of each rank, of a global batch of 9."""
SHARDS = {1: None, 2: (1, 3), 3: (2, 0, 5)}


class Everything(nn.Module):
    """Tied odd rows, frozen parts and a frozen float32, scalars, no elements, transposed, two rows, buffers."""

    def __init__(self, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), LowRank(), Block(7), Block(3)])
        self.blocks[0].up.weight = nn.Parameter(torch.randn(WIDTH, 5).t() / 3)
        self.blocks[2].none = nn.Parameter(torch.empty(0, 4))
        self.blocks[2].gate = nn.Parameter(torch.tensor(0.5))
        self.blocks[3].requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.double()
        self.head.weight = self.embedding.weight
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("forwards", torch.tensor(0))
        self.register_buffer("mask", torch.rand(1, WIDTH) > 0.2)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        self.forwards += 1
        x = self.dropout(self.embedding(tokens) * self.mask + self.shift)
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.head(x * self.blocks[2].gate) + self.blocks[2].none.sum()


class NoisyTokens(torch.utils.data.Dataset):
    """Token sequences whose labels are masked at random when they are read, as augmentation does."""

    def __init__(self, noise: float):
        self.noise = noise
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, VOCABULARY, (NUM_SAMPLES, 5), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.tokens[index, :-1], self.tokens[index, 1:].clone()
        y[torch.rand(4) < self.noise] = -1
        return x, y


class Run:
    """An engine with its loader and scheduler, from a seed of its own."""

    def __init__(self, stage: int, comm: Any, *, seed: int = 0, noise: float = 0.0, shards: Any = None):
        torch.manual_seed(seed)
        model = Everything(dropout=noise)
        plan = Plan.manual(SIZES[comm.world_size], zero_stage=stage, shard_ratios=shards)
        self.engine: Engine = poplar.initialize(
            model, adamw_two_groups(model), cross_entropy, plan=plan, weight=num_labels, comm=comm, max_grad_norm=1.0
        )
        self.loader = PlannedLoader(NoisyTokens(noise), plan, comm.rank, seed=5)
        self.scheduler = MultiStepLR(self.engine.optimizer, [2, 4], gamma=0.3)
        torch.manual_seed(seed * 100 + comm.rank)
        np.random.seed(comm.rank)
        random.seed(comm.rank)

    def train(self, num_steps: int) -> list[tuple[float, float]]:
        trace = []
        while len(trace) < num_steps:
            for micro_batches in self.loader:
                result = self.engine.step(micro_batches)
                self.scheduler.step()
                trace.append((result.loss, result.grad_norm))
                if len(trace) == num_steps:
                    break
        return trace

    def save(self, path: Path) -> None:
        self.engine.save(path, {"loader": self.loader.state_dict(), "scheduler": self.scheduler.state_dict()})

    def load(self, path: Path) -> None:
        extra = self.engine.load(path)
        self.scheduler.load_state_dict(extra["scheduler"])
        self.loader.load_state_dict(extra["loader"])

    def state(self) -> dict[str, Any]:
        """Return all that a checkpoint holds, whole."""
        optimizer = self.engine.full_optimizer_state_dict()
        groups = [{**group, "params": sorted(group["params"])} for group in optimizer["param_groups"]]
        return {"model": self.engine.full_state_dict(), "optimizer": optimizer["state"], "groups": groups}


def _differences(got: Any, expected: Any, where: str = "") -> list[str]:
    """Return where two nests of dicts, lists, tensors and values differ in any bit."""
    if isinstance(expected, Tensor):
        same = got.dtype == expected.dtype and got.shape == expected.shape and torch.equal(got, expected)
        return [] if same else [f"{where}: {got} is not {expected}"]
    if isinstance(expected, dict):
        names = {str(key) for key in got} ^ {str(key) for key in expected}
        return (
            [f"{where}: {sorted(names)} on one side"]
            if names
            else sum((_differences(got[key], value, f"{where}/{key}") for key, value in expected.items()), [])
        )
    return [] if got == expected else [f"{where}: {got} is not {expected}"]


def _random_numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def _raises(error: type[Exception], words: str, function: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=words):
        function(*args, **kwargs)


# What each rank does.


def _resume(rank: int, world_size: int, folder: Path, comm: Any) -> list[str]:
    """Train 3, save, train 4 more across the end of an epoch; the resumed run does the same to the last bit."""
    failures = []
    for stage in ZERO_STAGES:
        shards = SHARDS[world_size] if stage % 2 else None
        path = folder / f"resume-z{stage}"
        run = Run(stage, comm, noise=0.3, shards=shards)
        run.train(3)
        run.save(path)
        expected = [run.train(4), run.state(), _random_numbers(), run.loader.state_dict(), run.engine.num_steps]
        again = Run(stage, comm, seed=8, noise=0.3, shards=shards)
        if stage == 1:
            again.train(1)  # an engine that has state of its own loses it
        again.load(path)
        got = [again.train(4), again.state(), _random_numbers(), again.loader.state_dict(), again.engine.num_steps]
        # How often a rank ran forward is its own; rank 0's count is stored for all.
        if rank > 0:
            expected[1]["model"].pop("forwards"), got[1]["model"].pop("forwards")
        for a, b in zip(got, expected, strict=True):
            failures += _differences(a, b, f"z{stage}")
    return failures


def _any_to_any(rank: int, world_size: int, folder: Path, comm: Any, part: Any) -> list[str]:
    """Save on 3 ranks, load on ranks 0 and 1 together and on rank 2 alone, at every stage."""
    failures = []
    for saved in ZERO_STAGES:
        path = folder / f"reshard-z{saved}"
        run = Run(saved, comm, shards=SHARDS[3] if saved % 2 else None)
        run.train(3)
        run.save(path)
        states = run.state()
        states["model"]["forwards"] = comm.broadcast_object(states["model"]["forwards"], 0)
        expected = run.train(2)
        for loaded in ZERO_STAGES:
            where = f"z{saved} on 3 -> z{loaded} on {part.world_size}"
            other = Run(loaded, part, seed=7, shards=SHARDS[part.world_size] if loaded % 2 else None)
            with pytest.warns(PoplarWarning, match="it was saved on 3 ranks"):
                other.load(path)
            failures += _differences(other.state(), states, where)
            for got, value in zip(other.train(2), expected, strict=True):
                if not np.allclose(got, value, rtol=TOLERANCE, atol=0):
                    failures.append(f"{where}: {got} is not {value}")
        dist.barrier()
    return failures


def _to_more_ranks(rank: int, world_size: int, folder: Path, comm: Any, part: Any) -> list[str]:
    """Save on ranks 0 and 1, load on 3, two of which own nothing of a model with one element."""
    failures = []
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch = (x, torch.arange(6) % 3)

    def single(some: Any, stage: int, start: float) -> Engine:
        model = OneElement().double()
        model.weight.data.fill_(start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PoplarWarning)  # its unit is the whole model
            return poplar.initialize(model, sgd(model), cross_entropy, zero_stage=stage, comm=some)

    for stage in (1, 3):
        path = folder / f"grow-z{stage}"
        run, one = Run(stage, part, seed=2), single(part, stage, 0.7)
        run.train(2)
        one.step([batch])
        if rank < 2:
            run.save(path)
            one.save(f"{path}-one")
        expected = comm.gather_objects([*run.train(2), one.step([batch]).loss])[0]
        run, one = Run(stage, comm, seed=3), single(comm, stage, 0.1)
        with pytest.warns(PoplarWarning, match="it was saved on 2 ranks"):
            run.load(path)
        with pytest.warns(PoplarWarning, match="it was saved on 2 ranks"):
            one.load(f"{path}-one")
        # One rank's batch has the mean that both had together.
        got = [*run.train(2), one.step([batch] if rank == 1 else []).loss]
        for a, b in zip(got, expected, strict=True):
            if not np.allclose(a, b, rtol=TOLERANCE, atol=0):
                failures.append(f"z{stage} on 2 -> 3: {got} is not {expected}")
    return failures


def _only_rank_0(rank: int, world_size: int, folder: Path, comm: Any) -> None:
    """A save or load that not all ranks call ends soon, damages nothing, and does not spoil the next."""
    run = Run(3, comm)
    run.train(1)
    began = time.monotonic()
    if rank == 0:
        words = r"Engine.save: rank 0 was here, but ranks \[1, 2\] did not come within 0.3 s.*`if rank == 0:`"
        _raises(CommunicationError, words, save_checkpoint, run.engine, folder / "alone", timeout_s=0.3)
        assert time.monotonic() - began < 8
        assert not (folder / "alone").exists()
    run.train(1)
    if rank < 2:
        _raises(
            CommunicationError, r"ranks \[2\] did not come", load_checkpoint, run.engine, folder / "x", timeout_s=0.3
        )
    comm.barrier()  # where rank 2 has been all the time
    run.save(folder / "all")
    wrong = save_checkpoint if rank == 2 else load_checkpoint
    _raises(CommunicationError, "rank 0 has 'Engine.load', rank 2 'Engine.save'", wrong, run.engine, folder / "all")
    run.load(folder / "all")


def _failing_together(rank: int, world_size: int, folder: Path, comm: Any) -> list[str]:
    """Whatever fails, on whatever rank, all ranks raise, and the engine and the older checkpoint stay as they were."""
    run = Run(3, comm)
    run.train(2)
    path = folder / "good"
    run.save(path)
    run.train(1)
    before = run.state()
    if rank == 0:
        file = path / "optimizer-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    comm.barrier()
    _raises(CheckpointError, "optimizer-00001.safetensors is damaged: .* bytes", run.load, path)
    _raises(CheckpointError, "there is no checkpoint at .*nowhere", run.load, folder / "nowhere")
    _raises(CheckpointError, "could not save to .*NotADirectory|FileExists", run.save, path / "manifest.json" / "x")
    engine = run.engine
    _raises(CheckpointError, r"extra\['n'\] differs between rank 0 and rank 1", engine.save, path, {"n": rank, "m": 1})
    unfit = {"f": print} if rank == 1 else {"f": 1}
    _raises(CheckpointError, r"extra\['f'\] is a builtin_function", engine.save, path, unfit)
    with engine.unsharded():
        _raises(ConfigError, "unsharded", engine.save, path)
    failures = _differences(run.state(), before, "after failed loads and saves")
    engine.save(path, {"epoch": 3} if rank == 0 else None)
    assert engine.load(path) == {"epoch": 3}
    return failures


def _other_communicators(rank: int, world_size: int, folder: Path, comm: Any) -> list[str]:
    """Shards that are replicated over the ranks; and debug mode, where all ranks must mean the same collectives."""
    run = Run(2, CheckedComm(comm))
    run.train(1)
    run.save(folder / "debug")
    replicated = Run(3, HybridComm(None, "cpu", num_replicas=3), seed=4)
    replicated.load(folder / "debug")
    run.load(folder / "debug")
    failures = _differences(replicated.state(), run.state(), "replicated")
    replicated.save(folder / "replicated")
    run.train(1)
    run.load(folder / "replicated")
    return failures + _differences(run.state(), replicated.state(), "from replicated")


def _export(rank: int, world_size: int, folder: Path, comm: Any) -> list[str]:
    run = Run(3, comm)
    run.train(2)
    export_model(run.engine, folder / "exported")
    state = run.engine.full_state_dict()
    if rank > 0:
        return []
    model = Everything(dropout=0.0)
    load_model(model, folder / "exported" / "model.safetensors")
    assert model.head.weight is model.embedding.weight
    stored = load_file(folder / "exported" / "model.safetensors")
    assert set(state) - set(stored) == {"head.weight"}
    assert stored["shift"].dtype == torch.float32 and stored["blocks.1.base.weight"].abs().sum() > 0
    return _differences(dict(model.state_dict()), state, "exported")


def _everything(rank: int, world_size: int, folder: Path) -> list[str]:
    warnings.filterwarnings("ignore", "Initializing zero-element tensors")
    comm = ProcessGroupComm()
    halves = dist.new_group([0, 1]), dist.new_group([2])
    part = ProcessGroupComm(halves[rank // 2])
    failures = _resume(rank, world_size, folder, comm)
    failures += _any_to_any(rank, world_size, folder, comm, part)
    failures += _to_more_ranks(rank, world_size, folder, comm, part)
    _only_rank_0(rank, world_size, folder, comm)
    failures += _failing_together(rank, world_size, folder, comm)
    failures += _other_communicators(rank, world_size, folder, comm)
    return failures + _export(rank, world_size, folder, comm)


def test_checkpoints_of_any_ranks_load_on_any_ranks(tmp_path):
    """C01, C02, C04, C05, C09, C10, C11, C13, C14, C16, C17, C18, C20, L12, Z50."""
    for rank, failures in enumerate(run_ranks(_everything, 3, tmp_path, timeout_s=100)):
        assert not failures, f"rank {rank}:\n" + "\n".join(failures[:20])
