"""The meter of live tensor bytes: exact, in forward and backward, without keeping anything alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from poplar.device import is_out_of_memory
from poplar.memory_meter import MemoryMeter

KIB = 1024  # bytes of 256 float32


def _kib(n: int = 1) -> torch.Tensor:
    return torch.empty(n * 256)


def test_counts_storages_once_and_until_they_die():
    meter = MemoryMeter()
    with meter:
        a = _kib(2)
        views = [a[:10], a.view(2, 256), a.t(), a.detach(), a.reshape(-1)]
        a.mul_(0.0)
        assert meter.live_bytes == 2 * KIB
        b = a + 1
        pair = torch.chunk(b, 2), torch.stack([a, b])
        assert meter.live_bytes == 8 * KIB
        del b, pair
        assert meter.live_bytes == 2 * KIB
        del a
        assert meter.live_bytes == 2 * KIB  # the views hold the storage
        del views
        assert meter.live_bytes == 0
    assert meter.peak_bytes == 8 * KIB
    meter.reset_peak()
    assert meter.peak_bytes == 0


def test_memory_from_before_counts_only_where_tracked():
    before, other = _kib(3), _kib(5)
    meter = MemoryMeter()
    with meter:
        window = other[:100]  # a slice of a data set must not count all of it
        window.add_(1)
        assert meter.live_bytes == 0
        meter.track(before)
        meter.track([before.view(-1), {"again": before}])
        assert meter.live_bytes == 3 * KIB
    del before
    assert meter.live_bytes == 0  # deaths are seen after the meter has stopped, too


def test_track_finds_parameters_gradients_buffers_and_optimizer_state_once():
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("mask", torch.zeros(256))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 16)).sum().backward()
    optimizer.step()
    meter = MemoryMeter()
    meter.track(model, optimizer)
    # One tied weight, its gradient, its two moments, Adam's step counter, and the buffer.
    assert meter.live_bytes == 4 * KIB + 4 + KIB


def test_peak_of_a_training_step_is_exact():
    model = nn.Linear(256, 256, bias=False)  # 256 KiB
    x = torch.ones(64, 256)  # 64 KiB a batch of activations
    meter = MemoryMeter()
    meter.track(model)
    with meter:
        loss = model(x).relu().sum()
        assert meter.live_bytes == (256 + 64) * KIB + 4  # weight, relu's result (saved for backward), the sum
        loss.backward()
        del loss
        assert meter.live_bytes == 2 * 256 * KIB  # weight and gradient
        model.weight.grad = None
    assert meter.live_bytes == 256 * KIB
    # The most is in the product for the weight's gradient: both, the gradient of the activations, and two scalars.
    assert meter.peak_bytes == (2 * 256 + 64) * KIB + 8


class _Big(torch.autograd.Function):
    """Takes 1 MiB in backward alone."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + torch.zeros(256 * 1024).sum()


def test_backward_is_metered_and_its_out_of_memory_is_recovered_from():
    meter = MemoryMeter(limit_bytes=512 * KIB, owner="rank 2 (emulated t4-16g)")
    x = torch.ones(256, requires_grad=True)
    with meter:
        loss = _Big.apply(x).sum()
        with pytest.raises(torch.OutOfMemoryError, match=r"rank 2 \(emulated t4-16g\).*1\.0 MiB.* 0\.5 MiB") as caught:
            loss.backward()
        assert is_out_of_memory(caught.value)
        assert meter.live_bytes <= 3 * KIB  # the tensor there was no room for is gone, though the traceback lives
        assert meter.peak_bytes < 512 * KIB
        del loss, caught
        gc.collect()
        (x * 2).sum().backward()
        x.grad = None
    assert meter.live_bytes == 0


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_lowers_the_peak(use_reentrant):
    def peak(runs_checkpointed: bool) -> int:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)]
        meter = MemoryMeter()
        meter.track(*blocks)
        before = meter.live_bytes
        with meter:
            x = torch.ones(512, 32, requires_grad=True)
            y = x
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=use_reentrant) if runs_checkpointed else block(y)
            y.sum().backward()
            del x, y
            for block in blocks:
                block.zero_grad(set_to_none=True)
        assert meter.live_bytes == before
        return meter.peak_bytes - before

    assert peak(True) < 0.6 * peak(False)


def test_keeps_nothing_alive():
    meter = MemoryMeter()
    with meter:
        tensor = torch.zeros(10)
        storage = weakref.ref(tensor.untyped_storage())
        del tensor
        assert storage() is None
        for _ in range(50):
            torch.zeros(1000).sin().sum()
    assert meter.live_bytes == 0
    assert not meter._storages


def test_limit_refuses_and_leaves_everything_as_it_was():
    meter = MemoryMeter(limit_bytes=10 * KIB)
    with meter:
        a = _kib(6)
        with pytest.raises(torch.OutOfMemoryError):
            a + a
        assert (meter.live_bytes, meter.peak_bytes) == (6 * KIB, 6 * KIB)
        b = a[: 4 * 256] + 1
        assert meter.live_bytes == 10 * KIB  # the last byte may be used
        with pytest.raises(torch.OutOfMemoryError):
            b.clone()
    with pytest.raises(torch.OutOfMemoryError):
        meter.track(_kib(1))


def test_resizing_a_storage_counts_and_is_refused_before_it_happens():
    original = torch.UntypedStorage.resize_
    meter = MemoryMeter(limit_bytes=8 * KIB)
    with meter:
        flat = _kib(6)
        flat.untyped_storage().resize_(0)
        assert meter.live_bytes == 0
        other = _kib(4)
        with pytest.raises(torch.OutOfMemoryError):
            flat.untyped_storage().resize_(6 * KIB)
        assert flat.untyped_storage().nbytes() == 0
        del other
        flat.untyped_storage().resize_(6 * KIB)
        assert meter.live_bytes == 6 * KIB
        del flat
        assert meter.live_bytes == 0
    assert torch.UntypedStorage.resize_ is original


def test_operators_that_grow_their_tensor_count():
    meter = MemoryMeter()
    with meter:
        out = torch.empty(0)
        torch.add(torch.ones(256), 1, out=out)
        assert meter.live_bytes == KIB
        out.resize_(512)
        assert meter.live_bytes == 2 * KIB


def test_uncounted_memory_stays_uncounted():
    meter = MemoryMeter(limit_bytes=KIB)
    with meter:
        with meter.uncounted():
            host = _kib(100)
        assert meter.live_bytes == 0
        host.add_(1)
        host.untyped_storage().resize_(200 * KIB)
        del host
        assert (meter.live_bytes, meter.peak_bytes) == (0, 0)
        kept = _kib(1)
        assert meter.live_bytes == kept.untyped_storage().nbytes()


def test_other_kinds_of_tensors_pass():
    meter = MemoryMeter()
    with meter:
        torch.empty(1 << 30, device="meta") + 1
        sparse = torch.eye(3).to_sparse()
        assert torch.sparse.mm(sparse, torch.eye(3)).sum() == 3
        embedding = nn.Embedding(10, 4, sparse=True)
        embedding(torch.tensor([1, 2])).sum().backward()
        del sparse, embedding
    assert meter.live_bytes == 0
    assert meter.peak_bytes < 2 * KIB


def test_two_meters_at_once_both_count():
    outer, inner = MemoryMeter(), MemoryMeter()
    with outer:
        with inner:
            tensor = _kib(1)
            tensor.untyped_storage().resize_(0)
            tensor.untyped_storage().resize_(2 * KIB)
        assert inner.live_bytes == outer.live_bytes == 2 * KIB
        del tensor
    assert inner.live_bytes == outer.live_bytes == 0


class _Hungry(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.zeros(100_000).sum()


def test_processes_that_load_data_have_no_limit():
    with MemoryMeter(limit_bytes=100 * KIB):
        with pytest.raises(torch.OutOfMemoryError):
            _Hungry()[0]
        loaded = list(DataLoader(_Hungry(), num_workers=1, multiprocessing_context="fork"))
    assert torch.cat(loaded).tolist() == [0, 0]


_ACTIONS = st.lists(
    st.tuples(st.sampled_from(["new", "view", "copy", "add", "cat", "delete", "resize"]), st.integers(0, 40)),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(_ACTIONS)
def test_agrees_with_the_storages_of_all_live_tensors(actions):
    tensors: list[torch.Tensor] = []
    meter = MemoryMeter()
    with meter:
        for action, number in actions:
            if action == "new" or not tensors:
                tensors.append(torch.zeros(number + 1))
                continue
            chosen = tensors[number % len(tensors)]
            if action == "view":
                tensors.append(chosen[: number + 1])
            elif action == "copy":
                tensors.append(chosen.clone())
            elif action == "add":
                chosen.add_(1)
            elif action == "cat":
                tensors.append(torch.cat([chosen, chosen]))
            elif action == "delete":
                del tensors[number % len(tensors)]
            else:
                chosen.untyped_storage().resize_(chosen.untyped_storage().nbytes() + 4 * number)
            del chosen
            expected = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
            assert meter.live_bytes == sum(expected.values())
        tensors.clear()
        assert meter.live_bytes == 0
