"""Checkpoints of one process: what is stored, what is refused, and what a crash or a damaged disk leaves."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR, ReduceLROnPlateau

import poplar
from poplar.checkpoint import export_model, load_checkpoint, save_checkpoint
from poplar.checkpointing import files as checkpoint_files
from poplar.checkpointing.values import decode, encode
from poplar.engine import Engine
from poplar.errors import CheckpointError, ConfigError
from poplar.zero.comm import LoopbackComm
from poplar.zero.precision import PoplarWarning

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, hidden: int = 5, tied: bool = False):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6)
        if tied:
            self.blocks[1].weight = self.blocks[0].weight
        self.register_buffer("offset", torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.down(self.up(x)).square().mean()


def _engine(model: nn.Module | None = None, optimizer: Any = AdamW, seed: int = 0, **settings: Any) -> Engine:
    torch.manual_seed(seed)
    model = Net() if model is None else model
    optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(model.parameters(), lr=0.01)
    return poplar.initialize(model, optimizer, lambda m, x: m(x), comm=LoopbackComm(), **settings)


def _trained(num_steps: int = 2, **settings: Any) -> Engine:
    engine = _engine(**settings)
    for _ in range(num_steps):
        engine.step([X])
    return engine


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _whole(engine: Engine) -> list[Any]:
    state = engine.full_optimizer_state_dict()
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    return [engine.full_state_dict(), state["state"], groups, engine.num_steps]


# Values.

_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([torch.float32, torch.bfloat16])
)
_keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
_values = st.recursive(
    _leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(_keys, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(_values)
def test_values_come_back_through_json_as_they_were(value):
    assert _same(value, decode(json.loads(json.dumps(encode(value, "it")))))


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(0.1),
        torch.tensor([[1.0, math.inf], [-0.0, 1e-45]]),
        torch.zeros(0, 3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.float16),
        np.arange(4, dtype=np.uint32),
        np.zeros((2, 0)),
        Counter({30: 1, 80: 2}),
        {"!tuple": [1]},
        {"lr": (torch.tensor(0.1, dtype=torch.float64), 3)},
    ],
    ids=repr,
)
def test_tensors_arrays_and_odd_keys_come_back(value):
    assert _same(value, decode(json.loads(json.dumps(encode(value, "it")))))


def test_what_json_cannot_hold_is_named():
    with pytest.raises(CheckpointError, match=r"extra\['a'\]\[1\] is a function, which a checkpoint cannot hold"):
        encode([0, lambda: 0], "extra['a']")
    assert encode(np.float32(0.5), "it") == 0.5 and type(encode(np.int64(3), "it")) is int
    with pytest.raises(CheckpointError, match="unknown kind '!later'"):
        decode({"!later": 1})
    with pytest.raises(CheckpointError, match="dtype 'float3'"):
        decode({"!dtype": "float3"})


# State.


@pytest.mark.parametrize("optimizer", [SGD, Adam, AdamW, Adagrad, torch.optim.NAdam, torch.optim.ASGD])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_state_is_that_of_the_checkpoint_whatever_was_there(tmp_path, optimizer, num_steps):
    """Also when the optimizer on one side, or on both, has taken no step."""
    saved = _trained(num_steps, optimizer=optimizer)
    saved.save(tmp_path / "c")
    for before in (0, 1):
        engine = _trained(before, optimizer=optimizer, seed=4)
        engine.load(tmp_path / "c")
        assert _same(_whole(engine), _whole(saved))
    assert engine.step([X]) == saved.step([X]) and _same(_whole(engine), _whole(saved))


def test_many_small_files_hold_the_same(tmp_path):
    saved = _trained()
    save_checkpoint(saved, tmp_path / "c", max_file_bytes=150)
    files = sorted(path.name for path in (tmp_path / "c").glob("*.safetensors"))
    assert len(files) > 8 and files[0] == "model-00001.safetensors"
    assert all(path.stat().st_size < 1500 for path in (tmp_path / "c").glob("model-*.safetensors"))
    engine = _engine(seed=3)
    engine.load(tmp_path / "c")
    assert _same(_whole(engine), _whole(saved))


def test_settings_come_back_and_how_to_compute_stays(tmp_path):
    """Learning rates that are tensors keep their identity; schedulers hold them."""
    model = Net()
    saved = _engine(model, AdamW(model.parameters(), lr=torch.tensor(0.02), betas=(0.8, 0.9), foreach=False))
    saved.optimizer.param_groups[0]["initial_lr"] = 0.5
    saved.save(tmp_path / "c")
    other = Net()
    lr = torch.tensor(0.7)
    engine = _engine(other, AdamW(other.parameters(), lr=lr, fused=True))
    group = engine.optimizer.param_groups[0]
    engine.load(tmp_path / "c")
    assert engine.optimizer.param_groups[0] is group and group["lr"] is lr and lr.item() == pytest.approx(0.02)
    assert (group["betas"], group["initial_lr"], group["fused"], group["foreach"]) == ((0.8, 0.9), 0.5, True, None)
    plain = _engine()
    plain.load(tmp_path / "c")
    assert isinstance(plain.optimizer.param_groups[0]["lr"], Tensor)


def test_schedulers_go_on_where_they_were(tmp_path):
    makers = [
        lambda optimizer: MultiStepLR(optimizer, [2, 2, 3], gamma=0.1),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=9),
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=0),
    ]
    for make in makers:
        rates = []
        for resumed in (False, True):
            engine = _engine(optimizer=SGD)
            scheduler = make(engine.optimizer)
            for step in range(5):
                if resumed and step == 2:
                    engine.save(tmp_path / "c", {"scheduler": scheduler.state_dict()})
                    engine = _engine(optimizer=SGD, seed=1)
                    scheduler = make(engine.optimizer)
                    scheduler.load_state_dict(engine.load(tmp_path / "c")["scheduler"])
                engine.step([X])
                scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
                rates.append(engine.optimizer.param_groups[0]["lr"])
        assert rates[:5] == rates[5:] and len(set(rates)) > 2


def test_masters_are_stored_and_dtypes_follow_the_engine(tmp_path):
    saved = _trained(precision="bf16")
    saved.save(tmp_path / "c")
    stored = load_file(tmp_path / "c" / "model-00001.safetensors")
    assert stored["up.weight"].dtype == torch.float32 and stored["offset"].dtype == torch.bfloat16
    assert not torch.equal(stored["up.weight"], stored["up.weight"].bfloat16().float())
    same, wide = _engine(seed=2, precision="bf16"), _engine(seed=2)
    same.load(tmp_path / "c")
    wide.load(tmp_path / "c")
    assert _same(_whole(wide), _whole(saved)) and _same(_whole(same), _whole(saved))
    assert same.step([X]) == saved.step([X]) and _same(_whole(same), _whole(saved))
    with pytest.warns(
        PoplarWarning, match="8 parameters were rounded to another dtype, first .* from float32 to bfloat16"
    ):
        narrow = _engine(Net().bfloat16())
        narrow.load(tmp_path / "c")
    state = narrow.full_optimizer_state_dict()["state"]["up.weight"]
    assert state["exp_avg"].dtype == torch.bfloat16 and state["step"].dtype == torch.float32


def test_loss_scale_and_skipped_steps_come_back(tmp_path):
    saved = _engine(precision="fp16")
    saved.loss_scale.update(overflow=True)
    saved.num_steps, saved.num_skipped = 2, 3
    saved.save(tmp_path / "c")
    engine, wide = _engine(precision="fp16"), _engine()
    engine.load(tmp_path / "c")
    wide.load(tmp_path / "c")
    assert engine.loss_scale.state_dict() == saved.loss_scale.state_dict() and engine.loss_scale.value == 2.0**15
    assert (engine.num_steps, engine.num_skipped, wide.loss_scale.value) == (2, 3, 1.0)
    wide.save(tmp_path / "wide")
    engine.load(tmp_path / "wide")
    assert engine.loss_scale.value == 2.0**15  # a checkpoint without a scale has none to give


def test_parameters_may_be_frozen_on_either_side(tmp_path):
    """C13."""
    frozen, free = Net(), Net()
    frozen.blocks.requires_grad_(False)
    half, whole = _trained(model=frozen), _trained(model=free)
    half.save(tmp_path / "half")
    whole.save(tmp_path / "whole")
    free_again = _trained(model=Net(), seed=5)
    free_again.load(tmp_path / "half")
    assert _same(free_again.full_state_dict(), half.full_state_dict())
    assert set(free_again.full_optimizer_state_dict()["state"]) == {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert free_again.step([X]).loss == half.step([X]).loss
    again = Net()
    again.blocks.requires_grad_(False)
    engine = _engine(again)
    with pytest.warns(
        PoplarWarning, match="state of 4 parameters that are not trained here was left out: blocks.0.weight"
    ):
        engine.load(tmp_path / "whole")
    engine.step([X])


def test_parameters_that_joined_late_keep_a_step_count_of_their_own(tmp_path):
    model = Net()
    model.up.requires_grad_(False)
    saved = _trained(model=model)
    model.up.requires_grad_(True)
    saved.step([X])
    saved.save(tmp_path / "c")
    steps = {name: s["step"].item() for name, s in saved.full_optimizer_state_dict()["state"].items()}
    assert steps["up.weight"] == 1 and steps["down.weight"] == 3
    engine = _engine(seed=7)
    engine.load(tmp_path / "c")
    assert _same(_whole(engine)[1], _whole(saved)[1]) and engine.step([X]) == saved.step([X])


class _Compiled(nn.Module):
    """Names its module as ``torch.compile`` does."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._orig_mod = module

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x)


def test_names_are_those_without_wrappers(tmp_path):
    """C19."""
    model = Net()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.up = _Compiled(model.up)
    names = {name for name, _ in model.named_parameters()}
    assert {"blocks.0._checkpoint_wrapped_module.weight", "up._orig_mod.weight"} < names
    saved, plain = _trained(model=model), _engine(seed=3)
    saved.save(tmp_path / "c")
    plain.load(tmp_path / "c")
    assert _same(_whole(plain), _whole(saved))


class _Counting(Net):
    """Has state that is neither parameter nor buffer."""

    def __init__(self, total: float = 0.0):
        super().__init__()
        self.total = total

    def get_extra_state(self) -> dict[str, Any]:
        return {"total": self.total, "peak": torch.tensor([2.0])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.total = state["total"] + (state["peak"].item() - 2)


def test_extra_state_of_modules_comes_back(tmp_path):
    _engine(_Counting(0.1)).save(tmp_path / "c")
    model = _Counting()
    _engine(model).load(tmp_path / "c")
    assert model.total == 0.1
    with pytest.raises(
        CheckpointError, match="1 extra states of the checkpoint are not in this model, first '_extra_state'"
    ):
        _engine().load(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"_extra_state\['total'\] is a object"):
        _engine(_Counting(object())).save(tmp_path / "d")  # type: ignore[arg-type]


def test_random_state_goes_on(tmp_path):
    """C16."""
    engine = _engine()
    engine.save(tmp_path / "c")
    expected = torch.rand(3), np.random.rand(3)
    torch.rand(10), np.random.rand(10)
    engine.load(tmp_path / "c")
    assert _same((torch.rand(3), np.random.rand(3)), expected)


# Refused: another model or optimizer.


def _groups(model: nn.Module, *parts: Any) -> AdamW:
    return AdamW([{"params": part.parameters()} for part in parts], lr=0.01)


def _refusals() -> dict[str, tuple[Any, str]]:
    class More(Net):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(2, 2)

    class Fewer(Net):
        def __init__(self):
            super().__init__()
            self.up.bias = None

    class OtherBuffer(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("offset2", torch.ones(1))

    def regrouped():
        model = Net()
        return _engine(model, _groups(model, model.blocks, nn.ModuleList([model.up, model.down])))

    def swapped():
        model = Net()
        return _engine(model, _groups(model, nn.ModuleList([model.up, model.blocks]), model.down))

    return {
        "more": (lambda: _engine(More()), "2 parameters of this model are not in the checkpoint, first 'extra.weight'"),
        "fewer": (lambda: _engine(Fewer()), "1 parameters of the checkpoint are not in this model, first 'up.bias'"),
        "wider": (lambda: _engine(Net(7)), r"parameter up.weight has shape \(5, 6\) there, \(7, 6\) here"),
        "tied": (
            lambda: _engine(Net(tied=True)),
            r"blocks.0.weight has the names \['blocks.0.weight', 'blocks.1.weight'\]",
        ),
        "buffer": (
            lambda: _engine(OtherBuffer()),
            "1 buffers of this model are not in the checkpoint, first 'offset2'",
        ),
        "class": (lambda: _engine(optimizer=SGD), "holds the state of AdamW, this engine's optimizer is SGD"),
        "groups": (regrouped, "the checkpoint's optimizer has 1 groups, this engine's 2"),
        "swapped": (swapped, "parameter up.weight is in group 0 of this engine's optimizer and in group 1 of the"),
    }


@pytest.mark.parametrize("name", _refusals())
def test_another_model_is_refused_and_left_alone(tmp_path, name):
    make, words = _refusals()[name]
    model = Net()
    grouped = _engine(model, _groups(model, model.blocks, nn.ModuleList([model.up, model.down])))
    (grouped if name == "swapped" else _trained()).save(tmp_path / "c")
    engine = make()
    before = _whole(engine)
    with pytest.raises(CheckpointError, match=words):
        engine.load(tmp_path / "c")
    assert _same(_whole(engine), before)


def test_bad_extra_is_refused(tmp_path):
    engine = _engine()
    with pytest.raises(ConfigError, match="extra must be a dict with names as keys; got list"):
        engine.save(tmp_path / "c", [1])  # type: ignore[arg-type]
    assert not (tmp_path / "c").exists()


# Files.


def _damage(folder, name):
    """Return what the error must say."""
    manifest, model = folder / "manifest.json", folder / "model-00001.safetensors"
    if name == "no folder":
        shutil.rmtree(folder)
        return "there is no checkpoint at .*: manifest.json is missing$"
    if name == "between the renames":
        folder.rename(folder.with_name(f".{folder.name}.previous"))
        return "a save was interrupted, the checkpoint before it is .*previous"
    if name == "missing":
        (folder / "optimizer-00001.safetensors").unlink()
        return "optimizer-00001.safetensors is missing"
    if name == "truncated":
        model.write_bytes(model.read_bytes()[:-1])
        return r"model-00001.safetensors is damaged: [\d,]+ bytes, [\d,]+ were written"
    if name == "flipped":
        model.write_bytes(model.read_bytes()[:-1] + b"x")
        return "model-00001.safetensors is damaged: its SHA-256"
    if name == "random":
        (folder / "random.json").write_text("[]")
        return "random.json is damaged"
    if name == "half a manifest":
        manifest.write_text(manifest.read_text()[:200])
        return "manifest.json is damaged"
    if name == "edited manifest":
        manifest.write_text(manifest.read_text().replace('"num_steps": 2', '"num_steps": 9'))
        return "manifest.json is damaged or was edited"
    if name == "newer":
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
        return r"format version 2, this Poplar reads 1; use the Poplar that wrote it \(\d"
    manifest.write_text('{"weights": 1}')
    return "not the manifest of a Poplar checkpoint"


@pytest.mark.parametrize(
    "name",
    [
        "no folder",
        "between the renames",
        "missing",
        "truncated",
        "flipped",
        "random",
        "half a manifest",
        "edited manifest",
        "newer",
        "foreign",
    ],
)
def test_damage_is_found_before_anything_changes(tmp_path, name):
    """C18."""
    _trained().save(tmp_path / "c")
    words = _damage(tmp_path / "c", name)
    engine = _engine(seed=2)
    before = _whole(engine)
    with pytest.raises(CheckpointError, match=words):
        engine.load(tmp_path / "c")
    assert _same(_whole(engine), before)


def test_a_checkpoint_is_replaced_only_by_a_complete_one(tmp_path, monkeypatch):
    """C18: a save that fails, or was killed, leaves the older one; what it left behind is cleared away."""
    path, engine = tmp_path / "c", _engine()
    engine.save(path, {"n": 1})
    (tmp_path / ".c.partial").mkdir()  # of a save that was killed
    (tmp_path / ".c.partial" / "model-00009.safetensors").write_text("half")
    real = checkpoint_files.save_file

    def fails(tensors, *args, **kwargs):
        if any("/" in name for name in tensors):
            raise OSError(28, "No space left on device")
        real(tensors, *args, **kwargs)

    engine.step([X])
    monkeypatch.setattr(checkpoint_files, "save_file", fails)
    with pytest.raises(CheckpointError, match="rank 0 could not save to .*No space left"):
        engine.save(path, {"n": 2})
    monkeypatch.undo()
    rename = Path.rename

    def fails_to_rename(self, target):
        if self.name == ".c.partial":
            raise OSError(30, "Read-only file system")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_to_rename)
    with pytest.raises(CheckpointError, match="could not save to .*Read-only"):
        engine.save(path, {"n": 2})
    monkeypatch.undo()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c"]
    assert engine.load(path) == {"n": 1}
    engine.save(path, {"n": 3})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c"] and engine.load(path) == {"n": 3}
    assert "model-00009.safetensors" not in {file.name for file in path.iterdir()}


def test_a_failure_while_reading_says_what_state_the_engine_is_in(tmp_path, monkeypatch):
    engine = _trained()
    engine.save(tmp_path / "c")

    def fails(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint_files.TensorReader, "read_into", fails)
    with pytest.raises(CheckpointError, match="could not go on reading .* half loaded; load again.*Input/output"):
        engine.load(tmp_path / "c")
    monkeypatch.undo()
    assert engine.load(tmp_path / "c") == {} and engine.num_steps == 2


def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path):
    engine = _engine()
    (tmp_path / "thesis").mkdir()
    engine.save(tmp_path / "thesis")  # empty: fine
    shutil.rmtree(tmp_path / "thesis")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    with pytest.raises(CheckpointError, match="thesis exists and is not a checkpoint"):
        engine.save(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "precious"
    engine.save(tmp_path / "new" / "deep")
    (tmp_path / "latest").symlink_to(tmp_path / "new" / "deep")
    engine.step([X])
    engine.save(tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    load_checkpoint(engine, tmp_path / "new" / "deep")
    assert engine.num_steps == 1


# Export.


def test_an_exported_model_loads_without_poplar(tmp_path):
    """C09, C14."""
    model = Net(tied=True)
    model.up.to(torch.float16).requires_grad_(False)
    model.add_module("twice", model.blocks[0])
    model.blocks[0].register_buffer("count", torch.tensor(4))
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    engine = _engine(model, precision="bf16")
    export_model(engine, tmp_path / "one.safetensors")
    export_model(engine, tmp_path / "folder")
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["model.safetensors"]
    stored = load_file(tmp_path / "one.safetensors")
    assert _same(stored, load_file(tmp_path / "folder" / "model.safetensors"))
    assert stored["blocks.0.weight"].dtype == torch.float32 and stored["up.weight"].dtype == torch.float16
    assert "blocks.1.weight" not in stored and "scratch" not in stored
    other = Net(tied=True)
    other.up.half()
    other.add_module("twice", other.blocks[0])
    other.blocks[0].register_buffer("count", torch.tensor(0))
    load_model(other, tmp_path / "one.safetensors")
    assert _same(dict(other.state_dict()), engine.full_state_dict())
    with checkpoint_files.safe_open(tmp_path / "one.safetensors", framework="pt") as file:
        metadata = file.metadata()
    ties = {"blocks.1.weight", "twice.weight", "twice.bias", "twice.count"}
    assert set(metadata) == {"format", *ties} and metadata["blocks.1.weight"] == "blocks.0.weight"


def test_a_large_model_is_exported_as_several_files_and_an_index(tmp_path):
    engine = _engine()
    export_model(engine, tmp_path, max_file_bytes=300)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    loaded: dict[str, Tensor] = {}
    for file in files:
        loaded |= load_file(tmp_path / file)
    state = engine.full_state_dict()
    assert _same({name: loaded[name] for name in state}, state) and set(index["weight_map"]) == set(state)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    (tmp_path / "config.json").write_text("{}")
    export_model(engine, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_what_is_written_is_plain_json_and_tensors(tmp_path):
    """No pickle: every file is JSON or safetensors, readable without Poplar."""
    _trained().save(tmp_path / "c")
    for file in (tmp_path / "c").iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            assert file.suffix == ".safetensors" and load_file(file)
    model = Net()
    model.load_state_dict(load_file(tmp_path / "c" / "model-00001.safetensors"))
