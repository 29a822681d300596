"""Small models, each awkward in one way. Vector models map (n, 6) to (n, 3); token models map (n, 4) to (n, 4, 7).

Their blocks lie in a ``ModuleList`` named ``blocks``, so that each is a unit of its own; the rest is the root unit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, VOCABULARY = 6, 3, 7


def checkpointed(function: Callable[[Tensor], Tensor], x: Tensor, reentrant: bool = False) -> Tensor:
    """Run ``function`` under activation checkpointing, where gradients are wanted at all."""
    return checkpoint(function, x, use_reentrant=reentrant) if torch.is_grad_enabled() else function(x)


class Block(nn.Module):
    def __init__(self, hidden: int = 5):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Plain(nn.Module):
    """Blocks, then a head; most other models are this one with something changed."""

    def __init__(self, num_blocks: int = 2):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# Sharing.


class TiedAcross(nn.Module):
    """Embedding and head share an odd number of rows, in different units."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedWithin(Plain):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up = nn.Linear(WIDTH, WIDTH)
            block.down = nn.Linear(WIDTH, WIDTH)
            block.down.weight = block.up.weight


class TiedBlocks(Plain):
    """One block's weight is also another's."""

    def __init__(self):
        super().__init__(3)
        self.blocks[2].up.weight = self.blocks[0].up.weight


class SameBlockTwice(Plain):
    """One module object at two places of the list."""

    def __init__(self):
        super().__init__()
        self.blocks.append(self.blocks[0])


class UsedTwice(Plain):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return self.head(first(second(first(x))))


class Recurrent(nn.Module):
    """A cell used many times."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.GRUCell(2, WIDTH), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), WIDTH)
        for part in x.view(len(x), 3, 2).unbind(1):
            state = self.blocks[0](part, state)
        return self.head(self.blocks[1](state))


class Siamese(Plain):
    """A checkpointed encoder run on two inputs before either goes backward."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpointed(block, x, self.reentrant)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return self.head(self.encode(x) * self.encode(x.flip(1)))


class CheckpointedShared(Plain):
    """Checkpointed segments over frozen parts and a shared block."""

    def __init__(self, reentrant: bool):
        super().__init__(3)
        self.reentrant = reentrant
        self.stem = nn.Linear(WIDTH, WIDTH)
        for param in self.blocks[1].parameters():
            param.requires_grad_(False)
        self.blocks[2].up.bias.requires_grad_(False)

    def _segment(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpointed(self._segment, self.stem(x), self.reentrant)
        x = checkpointed(self.blocks[2], x, self.reentrant)
        x = checkpointed(self._segment, x, self.reentrant)
        return self.head(x)


class NestedCheckpoint(Plain):
    def _inner(self, x: Tensor) -> Tensor:
        return checkpointed(self.blocks[1], self.blocks[0](x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpointed(self._inner, x))


# Frozen and unused.


class LowRank(nn.Module):
    """A frozen linear and a trained low-rank update beside it (LoRA); the norm is frozen too."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.a = nn.Parameter(torch.randn(2, WIDTH) / 3)
        self.b = nn.Parameter(torch.randn(WIDTH, 2) / 3)
        for param in (*self.base.parameters(), *self.norm.parameters()):
            param.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(self.norm(x)) + x @ self.a.T @ self.b.T)


class LowRankMix(Plain):
    def __init__(self, checkpointed: bool = False):
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList([LowRank(), Block(), LowRank()])
        self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpointed(block, x) if self.checkpointed else block(x)
        return self.head(x)


class FrozenStart(Plain):
    """Backward never reaches the first block, and passes through the third, which is frozen."""

    def __init__(self):
        super().__init__(4)
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)


class FrozenInterleaved(Plain):
    """A frozen block and a trained one take turns."""

    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return self.head(second(first(second(first(second(first(x)))))))


class NoGradPass(Plain):
    """A block runs once without gradients and once with (a teacher of itself)."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.blocks[1](self.blocks[0](x))
        return self.head(self.blocks[1](self.blocks[0](x)) - 0.5 * target)


class Unused(Plain):
    def __init__(self):
        super().__init__(3)
        self.spare = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.blocks[0](x)))


# Paths that differ between ranks and batches.


class Experts(Plain):
    """Each sample goes to one expert; a micro-batch uses some of them, in an order of its own."""

    def __init__(self):
        super().__init__(4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] * 1000).long().remainder(3)
        out = torch.zeros_like(x)
        for index in dict.fromkeys(chosen.tolist()):
            rows = chosen == index
            out = out.index_put((rows,), self.blocks[index](x[rows]))
        return self.head(self.blocks[3](out))


class EarlyExit(Plain):
    """Depth depends on the sample."""

    def __init__(self):
        super().__init__(3)

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for row in x:
            depth = 1 + int((row[0] * 1000).long().remainder(3))
            for block in self.blocks[:depth]:
                row = block(row)
            outputs.append(row)
        return self.head(torch.stack(outputs))


class SkippedInEvaluation(Plain):
    def __init__(self):
        super().__init__(3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks if self.training else (self.blocks[2], self.blocks[0]):
            x = block(x)
        return self.head(x)


# Shapes and layouts.


class Scalars(Plain):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks[0].gate = nn.Parameter(torch.tensor(0.5))
        self.blocks[0].register_forward_hook(lambda module, args, out: out * module.gate)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class ZeroElements(Plain):
    """Parameters without elements, in the middle and at the end of a unit, and a unit of nothing else."""

    def __init__(self):
        super().__init__(3)
        self.blocks[0].none = nn.Parameter(torch.empty(0, 4))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            self.blocks[1] = nn.Linear(WIDTH, 0)
            self.back = nn.Linear(0, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = x + self.back(self.blocks[1](x))
        return self.head(self.blocks[2](x)) + self.blocks[0].none.sum()


class OneElement(nn.Module):
    """A single parameter of a single element: with three ranks, two own nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :CLASSES] * self.weight


class Primes(Plain):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(13), Block(17)])


class Transposed(Plain):
    """Parameters whose memory is not in row order."""

    def __init__(self):
        super().__init__()
        self.blocks[0].up.weight = nn.Parameter(torch.randn(WIDTH, 5).t() / 3)
        self.cube = nn.Parameter(torch.randn(2, 3, WIDTH).permute(2, 0, 1) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.cube.flatten(1)).view(-1, 2, 3).sum(1)


class ChannelsLast(nn.Module):
    """Convolutions in channels_last, then a frozen-statistics batch norm."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(1, 4, 2), nn.Conv2d(4, 3, 1)])
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 2, 3).contiguous(memory_format=torch.channels_last)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.mean((2, 3))


class Complex(Plain):
    """A complex parameter, which keeps its dtype when the model is made float64."""

    def __init__(self):
        super().__init__()
        self.blocks[0].phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128) / 3)
        self.blocks[0].register_forward_hook(lambda module, args, out: out + (torch.fft.fft(out) * module.phase).abs())


class FrozenIntegers(Plain):
    """Parameters that can only be frozen: integers and booleans."""

    def __init__(self):
        super().__init__()
        self.blocks[0].order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
        self.blocks[0].mask = nn.Parameter(torch.arange(WIDTH) % 3 > 0, requires_grad=False)
        self.blocks[0].register_forward_hook(lambda module, args, out: (out * module.mask)[:, module.order])


# Parameters read in unusual places.


class FunctionalHead(nn.Module):
    """The embedding's weight is read in the parent's forward."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embedding.weight)


class ForeignWeight(Plain):
    """A block's weight is read outside of the block, before and after it has run."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + x @ self.blocks[1].up.weight.T @ self.blocks[1].down.weight.T
        x = super().forward(x)
        return x * self.blocks[0].up.weight.square().mean()


class AskedForDtype(Plain):
    """Shape, dtype and device of a resharded weight are asked for."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.blocks[1].up.weight
        assert weight.shape == (5, WIDTH) and weight.is_contiguous() is not None
        return super().forward(x.to(weight.dtype).to(weight.device)) / weight.size(1)


class ParameterContainers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(3))
        self.named = nn.ParameterDict({"out": nn.Parameter(torch.randn(WIDTH, CLASSES) / 3)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x @ self.named["out"]


class Methods(Plain):
    """Never called as a whole: the loss calls methods and blocks."""

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("not to be called")


# Outputs and state.


class ReturnsTuple(Plain):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


class DictBlock(Block):
    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        x = super().forward(state["x"])
        return {"x": x, "energy": state["energy"] + x.square().mean(-1, keepdim=True)}


class ReturnsDict(Plain):
    """Blocks take and give dicts."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(DictBlock() for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        state = {"x": x, "energy": torch.zeros_like(x[:, :1])}
        for block in self.blocks:
            state = block(state=state)
        return {"logits": self.head(state["x"]) + state["energy"], "unused": state["energy"]}


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()


class DataclassBlock(Block):
    def forward(self, given: Output) -> Output:
        x = super().forward(given.logits)
        return Output(x, (*given.hidden, x))


class ReturnsDataclass(Plain):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(DataclassBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Output:
        out = Output(x)
        for block in self.blocks:
            out = block(out)
        return Output(self.head(out.logits) + self.head(out.hidden[0]), out.hidden)


class SideOutput(Plain):
    """Each block leaves an auxiliary loss on itself, by sample."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            block.side = x.square().mean(-1)
        return self.head(x)


class Buffers(Plain):
    """Buffers that are read: one that is not saved, one whose memory is not in row order."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("mask", torch.tril(torch.ones(WIDTH, WIDTH)), persistent=False)
        self.register_buffer("transposed", torch.randn(WIDTH, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x + self.shift) @ self.mask + self.transposed.sum(0))


class FrozenStatistics(nn.Module):
    """Batch normalisation with fixed statistics."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[1].eval()
        for block in self.blocks:
            x = block(x)
        return x


# Wrappers and other people's modules.


class Delegating(nn.Module):
    """Passes unknown attributes on to what it wraps."""

    def __init__(self, inner: nn.Module | None = None):
        super().__init__()
        self.inner = inner or Plain()

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class DelegatingBlocks(Plain):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Delegating(Block()) for _ in range(2))


class Compiled(Plain):
    """One block compiled in place, one wrapped."""

    def __init__(self, backend: str = "eager"):
        super().__init__(3)
        torch.compiler.reset()  # recompilations are counted by code, and a process builds this model many times
        self.blocks[0].compile(backend=backend, dynamic=True)
        self.blocks[1] = torch.compile(self.blocks[1], backend=backend, dynamic=True)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class OwnFunction(Plain):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.weight = nn.Parameter(torch.randn(WIDTH))
            block.register_forward_hook(lambda module, args, out: _Scale.apply(out, module.weight))


class WeightNorm(Plain):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            weight_norm(block.up)
        weight_norm(self.head)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


class Attention(nn.Module):
    """``nn.MultiheadAttention`` reads its output projection's weight without calling it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in (*self.blocks, self.attention):
            x = x + block(x, x, x, need_weights=False)[0]
        return self.head(x)


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.blocks = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.lstm(self.embedding(tokens))
        x, _ = self.blocks[0](x)
        return self.head(self.blocks[1](x))


class InPlace(Plain):
    """Activations overwritten in place, and a view of a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.leaky_relu_(block(x), 0.1)
        return self.head(x).add_(self.head.bias.view(1, -1))


class NestedLists(nn.Module):
    """Lists and dicts of modules inside one another."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(nn.ModuleDict({"a": Block()})["a"], Block()) for _ in range(2))
        self.heads = nn.ModuleDict({"one": nn.Sequential(nn.Linear(WIDTH, CLASSES)), "two": nn.Linear(WIDTH, CLASSES)})

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.heads["one"](x) + self.heads["two"](x)
