"""Where the engine meets what is outside of it: transports, meta models, gradients and weights that others write."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import poplar
from poplar.errors import CommunicationError, ConfigError, ModelError, PoplarError, StepError
from poplar.memory_meter import MemoryMeter
from poplar.zero import shared_memory
from poplar.zero.comm import LoopbackComm, ProcessGroupComm
from poplar.zero.debug import CheckedComm
from poplar.zero.flat import shard_offsets
from poplar.zero.precision import PoplarWarning
from poplar.zero.shared_memory import DISABLED_BY, SharedMemoryTransport
from poplar.zero.transport import GlooTransport, HostStagedTransport, _timeout_s, choose_transport
from tests.helpers import zoo
from tests.helpers.models import Batch, Case, adamw_two_groups, cross_entropy, num_labels, sgd, tokens
from tests.helpers.parity import build, check, distance, reference, rows_of
from tests.helpers.spawn import run_ranks

PLAIN = Case(name="plain", model=partial(zoo.Plain, 3))
TOKEN = Case(name="tokens", model=zoo.TiedAcross, data=tokens, optimizer=adamw_two_groups)


def _raises(kind: Any, text: str, call: Callable[[], Any]) -> None:
    """``pytest.raises`` whose message says what was expected, since a rank's traceback is all that is shown."""
    try:
        call()
    except kind as error:
        assert text in str(error), f"expected {text!r} in: {error}"
        return
    raise AssertionError(f"nothing raised, expected {kind} with {text!r}")


def _own(rank: int, batch: Batch) -> list[Batch]:
    return [rows_of(batch, rows) for rows in ([[0, 1, 2], [3]], [[4, 5, 6, 7, 8]])[rank]]


# Transports: through host memory as straight over gloo.


class _CommThrough(ProcessGroupComm):
    """Sends by a transport of the given class, whatever would be the fastest."""

    def __init__(self, transport: Callable[[dist.ProcessGroup], Any]):
        super().__init__()
        self._transport = transport(self.group)

    def __repr__(self) -> str:  # the parity body draws its splits by it, on all ranks alike
        return self.transport_name


def _staged(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    shared = choose_transport(group, torch.device("cpu"))
    assert isinstance(shared, SharedMemoryTransport)
    patient = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=77))
    assert _timeout_s(patient) == 77.0
    transports = [shared, GlooTransport(group), HostStagedTransport(group)]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for ratios in ([1.0] * world_size, [0.0, 1.0, 2.5][:world_size]):
            for numel in (0, 1, 37):
                offsets = shard_offsets(numel, ratios)
                own = slice(offsets[rank], offsets[rank + 1])
                for transport in transports:
                    where = f"{type(transport).__name__}, {dtype}, {offsets}"
                    counted = torch.arange(offsets[-1]).to(dtype)
                    full = torch.full_like(counted, -1)
                    full[own] = counted[own]
                    transport.all_gather(full, offsets).wait()
                    assert torch.equal(full, counted), f"all-gather by {where}"
                    mine = counted * (rank + 1)
                    kept = mine[own]
                    transport.reduce_scatter(mine, offsets).wait()
                    assert torch.equal(kept, counted[own] * sum(range(1, world_size + 1))), f"reduce-scatter by {where}"
                    value = counted * (rank + 1)
                    if dtype != torch.bfloat16:  # gradients travel in float32 or better
                        transport.all_reduce(value).wait()
                        assert torch.equal(value, counted * sum(range(1, world_size + 1))), f"all-reduce by {where}"
                    transport.broadcast(value.fill_(rank), src=world_size - 1)
                    assert value.eq(world_size - 1).all(), f"broadcast by {where}"
    expected = reference(TOKEN)
    for stage in range(4):
        for transport in (HostStagedTransport, GlooTransport):
            check(rank, world_size, TOKEN, stage, [1.0, 2.0, 0.5][:world_size], expected, comm=_CommThrough(transport))


def _full_outboxes(rank: int, world_size: int) -> None:
    """Messages of many chunks and a single slot: every rank waits for room, in every mode that blocks elsewhere too."""
    shared_memory.SLOT_BYTES, shared_memory.NUM_SLOTS = 64, 1
    expected = reference(PLAIN)
    for stage in range(4):
        check(rank, world_size, PLAIN, stage, None, expected)
        check(rank, world_size, PLAIN, stage, None, expected, num_replicas=2)
        check(rank, world_size, PLAIN, stage, None, expected, debug=True)
    for options in ({}, {"num_replicas": 2}, {"debug": True}):
        for idle in ({1, 2}, {0, 3}, {0, 1, 2}):
            model = build(PLAIN, seed=rank)
            engine = poplar.initialize(model, sgd(model), _fails_where_told, zero_stage=3, **options)
            data = PLAIN.data(0)
            for _ in range(2):
                engine.step([None, None] if rank in idle else [data, data])
            model.fails = rank in idle
            _raises((ModelError, StepError), "told to fail", partial(engine.step, [data, data]))
            model.fails = False
            engine.step([data, None] if rank in idle else [None, data])
            engine.close()


def _fails_where_told(model: nn.Module, batch: Batch) -> Tensor:
    if getattr(model, "fails", False):
        raise ModelError("told to fail")
    return cross_entropy(model, batch)


def test_full_outboxes_hang_nobody() -> None:
    run_ranks(_full_outboxes, 4, timeout_s=110)


def test_shared_memory_messages_and_staging_are_the_same() -> None:
    """Z44: sums, never averages; Z46: dtypes that gloo's own collectives refuse; Z47: equal and skewed parts."""
    run_ranks(_staged, 3, timeout_s=60)


# Ranks that differ, gradients and weights that somebody else writes: an error on every rank, and no trace.


def _differing(rank: int, world_size: int) -> None:
    """Z45."""
    for stage in range(4):
        model = build(PLAIN, seed=0)
        units = ["blocks.0", "blocks.1"] if rank == 0 else ["blocks.0"]
        start = partial(poplar.initialize, model, sgd(model), cross_entropy, zero_stage=stage)
        _raises(CommunicationError, "the ranks' models differ", partial(start, units=units))
        _raises(CommunicationError, "the ranks' models differ", partial(start, shard_ratios=[1.0, 1.0 + rank]))
    comm = CheckedComm(ProcessGroupComm())
    for call in (comm.all_reduce, partial(comm.reduce_scatter, offsets=[0, 2, 4 + 2 * rank])):
        _raises(CommunicationError, f"rank {rank} is at", partial(call, torch.ones(4 + 2 * rank), name="a bucket"))


def _backward_in_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss = cross_entropy(model, batch)
    if getattr(model, "is_wayward", False):
        loss.backward(retain_graph=True)
    return loss


def _foreign_backward(rank: int, world_size: int) -> None:
    """Z03: a second backward is refused, since its gradients would count unweighted; two losses are one sum."""
    expected = reference(PLAIN)
    for stage in range(4):
        model = build(PLAIN, seed=rank)
        engine = poplar.initialize(model, sgd(model), _backward_in_loss, zero_stage=stage)
        for step in range(2):
            model.is_wayward = rank == 1
            own = _own(rank, PLAIN.data(step))
            _raises((ModelError, StepError), "got a gradient outside of the backward", partial(engine.step, own))
            model.is_wayward = False
            with engine.unsharded() as whole:
                call = cross_entropy(whole, PLAIN.data(0)).backward
                _raises(ModelError, "got a gradient outside of the backward", call)
            engine.step(own)
        got = engine.full_state_dict()
        for name, value in expected.weights[1].items():
            assert distance(got[name], value) < 1e-12, f"z{stage}: {name} off by {distance(got[name], value)}"
        engine.close()


class _Renormalising(nn.Module):
    def __init__(self, bag: bool):
        super().__init__()
        self.embedding = (nn.EmbeddingBag if bag else nn.Embedding)(7, 3, max_norm=1.0)


def _self_writing(rank: int, world_size: int) -> None:
    """A model that writes its own weights in forward, each rank by its own samples."""
    for stage in range(4):
        for bag in (False, True):
            model = _Renormalising(bag)
            _raises(
                ModelError, "has max_norm=1.0: its forward rewrites its weight",
                partial(poplar.initialize, model, sgd(model), cross_entropy, zero_stage=stage),
            )  # fmt: skip
        model = _Renormalising(False)
        alone = partial(poplar.initialize, model, sgd(model), cross_entropy, zero_stage=stage, comm=LoopbackComm(0, 1))
        if stage == 3:
            _raises(ModelError, "max_norm=1.0", alone)
        else:
            _raises(ModelError, "max_norm=1.0", partial(alone, precision="bf16"))
            alone().close()
    lazy = nn.Sequential(nn.LazyLinear(3))
    sparse = nn.Linear(6, 3)
    sparse.weight = nn.Parameter(sparse.weight.detach().to_sparse())
    for model, text in ((lazy, "0.weight has no shape yet"), (sparse, "weight has the layout torch.sparse_coo")):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        _raises(ModelError, text, partial(poplar.initialize, model, optimizer, cross_entropy))
    for wrap in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):
        model = nn.Sequential(wrap(nn.Linear(zoo.WIDTH, zoo.CLASSES)))
        with pytest.warns(PoplarWarning, match="spectral_norm goes on with its power iteration in every forward"):
            poplar.initialize(model, sgd(model), cross_entropy).close()
    mixed = zoo.Complex()
    text = "max_grad_value cannot clip blocks.0.phase, which is complex"
    _raises(ConfigError, text, partial(poplar.initialize, mixed, sgd(mixed), cross_entropy, max_grad_value=1.0))


def _refusals(rank: int, world_size: int) -> None:
    for part in (_differing, _foreign_backward, _self_writing):
        part(rank, world_size)


def test_what_ranks_cannot_share_is_refused_everywhere_and_leaves_no_trace() -> None:
    run_ranks(_refusals, 2, timeout_s=60)


# Models on meta.


class _Counted(nn.Module):
    """A buffer, and a parameter in no other module, that ``reset_parameters`` fills."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(zoo.WIDTH))
        self.register_buffer("shift", torch.empty(zoo.WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.normal_()
            self.shift.fill_(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class _Frequencies(nn.Module):
    """A buffer alone, as rotary embeddings have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(zoo.WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.frequencies.copy_(torch.linspace(1, 2, zoo.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.frequencies


class _WithoutReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((zoo.WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _various() -> nn.Module:
    return nn.Sequential(
        _Frequencies(), nn.Linear(zoo.WIDTH, zoo.WIDTH), _Counted(), nn.BatchNorm1d(zoo.WIDTH).eval(),
        nn.Linear(zoo.WIDTH, zoo.CLASSES),
    )  # fmt: skip


# Buffers; a tie, whose values the first module decides; modules that overwrite what their children have drawn.
META = (_various, zoo.TiedAcross, zoo.Attention)


def _on_meta(rank: int, world_size: int) -> None:
    warnings.filterwarnings("ignore", ".*at stage 3 it is gathered whole", PoplarWarning)
    for make in META:
        torch.manual_seed(7)
        seeded = make()
        for stage in range(4):
            for ratios in (None, [1.0, 3.0]):
                where = f"{make.__name__}, z{stage}, shards {ratios}"
                with torch.device("meta"):
                    model = make()
                optimizer = adamw_two_groups(model)
                # One unit, so that values are drawn in the order of a build; rank 1's do not count.
                torch.manual_seed(7 + rank)
                engine = poplar.initialize(
                    model, optimizer, cross_entropy, zero_stage=stage, shard_ratios=ratios, units=(), weight=num_labels
                )  # fmt: skip
                got = engine.full_state_dict()
                assert list(got) == list(seeded.state_dict()), where
                for name, value in seeded.state_dict().items():
                    assert torch.equal(got[name], value), f"{where}: {name} is not that of a seeded build"
                x, y = PLAIN.data(0) if make is _various else tokens(0)
                batch = (x.float() if x.is_floating_point() else x, y)
                result = engine.step(_own(rank, batch))
                assert abs(result.loss - cross_entropy(seeded, batch).item()) < 1e-5, where
                rows = engine.comm.gather_floats([v.double().sum().item() for v in engine.full_state_dict().values()])
                assert rows[0] == rows[1], f"{where}: ranks disagree"
                engine.close()


def _meta_on_some_or_lacking(rank: int, world_size: int) -> None:
    """Rank 0 has read a model, the others have none yet; and what cannot get values, which is told every time."""
    for stage in (0, 3):
        with torch.device("meta" if rank == 1 else "cpu"):
            model = nn.Sequential(nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, 3), _WithoutReset())
        read = {name: value.clone() for name, value in model.state_dict().items()}
        engine = poplar.initialize(model, sgd(model), cross_entropy, zero_stage=stage)
        got = engine.full_state_dict()
        assert rank == 1 or all(torch.equal(got[name], value) for name, value in read.items())
        assert torch.equal(got["2.scale"], torch.full((zoo.WIDTH,), 0.5)), f"z{stage}"
        engine.close()
        with torch.device("meta"):
            lacking = nn.Sequential(nn.Linear(2, 2), _WithoutReset())
        start = partial(poplar.initialize, lacking, sgd(lacking), cross_entropy, zero_stage=stage)
        for _ in range(2):
            _raises(PoplarError, "'scale' of module '1' (_WithoutReset) is on meta", start)
        with torch.device("meta"):
            early = nn.Linear(2, 2)
        start = partial(poplar.initialize, early, torch.optim.Adagrad(early.parameters()), cross_entropy)
        _raises(ConfigError, "Adagrad makes state when it is built", start)


def _meta_memory(rank: int, world_size: int) -> None:
    """At stage 3 no rank ever holds the whole model: its shards, and a unit's copy or two."""
    with torch.device("meta"):
        model = _deep(12)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    meter = MemoryMeter()
    with meter:
        engine = poplar.initialize(model, optimizer, _mean_square, zero_stage=3)
    unit_bytes = sum(buffer.padded_numel * 4 for buffer in engine.units[0].buffers)
    assert len(engine.units) == 12 and meter.live_bytes < 6.1 * unit_bytes, meter.live_bytes / unit_bytes
    assert meter.peak_bytes < (6 + 2.1) * unit_bytes, meter.peak_bytes / unit_bytes
    engine.close()


def _meta(rank: int, world_size: int) -> None:
    for part in (_on_meta, _meta_on_some_or_lacking, _meta_memory):
        part(rank, world_size)


def test_models_on_meta_start_as_a_seeded_build_does_and_unit_by_unit() -> None:
    run_ranks(_meta, 2, timeout_s=60)


# Loopback against the real run: what the profiler measures is what training needs.

WIDTH = 64


def _deep(num_units: int = 6) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_units)))


def _mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch)


def _peak(rank: int, world_size: int, stage: int, ratios: list[float] | None, loopback: bool) -> tuple[int, Any]:
    meter = MemoryMeter()
    comm = LoopbackComm(rank, world_size) if loopback else ProcessGroupComm()
    with meter:
        torch.manual_seed(0)
        model = _deep()
        optimizer = torch.optim.AdamW(model.parameters())
        engine = poplar.initialize(
            model, optimizer, _mean_square, zero_stage=stage, shard_ratios=ratios, comm=comm, max_grad_norm=1.0
        )
        for _ in range(2):
            engine.step([torch.ones(4, WIDTH)] * 2)
        meter.reset_peak()
        engine.step([torch.ones(4, WIDTH)] * 2)
        layout = [[(b.dtype, b.offsets, b.shard.numel()) for b in unit.buffers] for unit in engine.units]
    engine.close()
    return meter.peak_bytes, layout


def _loopback(rank: int, world_size: int, way: str) -> list[float]:
    os.environ[DISABLED_BY] = "1" if way == "messages" else "0"
    shares = []
    for stage in range(4):
        for ratios in (None, [1.0, 3.0]):
            (real, layout), (alone, same) = (_peak(rank, world_size, stage, ratios, flag) for flag in (False, True))
            assert layout == same, f"z{stage}: other buffers over loopback"
            shares.append(alone / real)
    return shares


def test_loopback_needs_the_memory_of_the_real_run() -> None:
    for shares in run_ranks(_loopback, 2, "messages", timeout_s=60):
        assert all(0.95 < share < 1.05 for share in shares), shares
    # Through shared memory, sums need no memory to receive in.
    for shares in run_ranks(_loopback, 2, "shared memory", timeout_s=60):
        assert all(0.95 < share < 1.15 for share in shares), shares


# Machine code.


def _inductor(rank: int, world_size: int) -> None:
    case = Case(name="inductor", model=partial(zoo.Compiled, "inductor"), num_steps=2)
    warnings.simplefilter("ignore")  # the compiler's own
    expected = reference(case)
    for stage in (0, 3):
        check(rank, world_size, case, stage, None, expected)


@pytest.mark.skipif(
    "POPLAR_TEST_INDUCTOR" not in os.environ, reason="compiles C++ for a minute: POPLAR_TEST_INDUCTOR=1"
)
def test_blocks_compiled_to_machine_code() -> None:
    run_ranks(_inductor, 2, timeout_s=110)
