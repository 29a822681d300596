"""The default recipe, and finding recipes by name."""

from __future__ import annotations

import math
import pickle
import sys
from collections import Counter

import pytest
import torch

from poplar.config import Recipe
from poplar.errors import ConfigError
from poplar.recipe_loading import load_recipe
from poplar.recipes import bytes_gpt as module
from poplar.recipes.bytes_gpt import (
    BytesGptConfig,
    ByteWindows,
    bytes_gpt,
    next_byte_loss,
    read_text,
    recipe,
    unigram_entropy,
)

SMALL = BytesGptConfig(
    num_layers=1, width=64, seq_len=32, learning_rate=0.01, warmup_steps=5, total_steps=60, max_text_bytes=1 << 20
)


def test_windows_make_every_byte_a_target_once():
    text = bytes(range(100))
    windows = ByteWindows(text, seq_len=8)
    assert len(windows) == 12
    assert all(window.shape == (9,) and window.dtype == torch.int64 for window in windows)
    targets = [byte for window in windows for byte in window[1:].tolist()]
    assert targets == list(range(1, 97))
    with pytest.raises(IndexError):
        windows[12]
    with pytest.raises(IndexError):
        windows[-1]


def test_held_out_windows_are_spread_over_the_text():
    windows = ByteWindows(bytes(range(256)) * 4, seq_len=16, max_samples=4)
    assert [int(windows[index][0]) for index in range(4)] == [0, (15 * 16) % 256, (30 * 16) % 256, (45 * 16) % 256]
    assert len(ByteWindows(bytes(100), seq_len=16, max_samples=50)) == 6


def test_text_too_short_for_a_window():
    with pytest.raises(ConfigError, match="the text has 8 bytes, a window of seq_len 8 needs 9"):
        ByteWindows(bytes(8), seq_len=8)


def test_text_is_the_standard_librarys_and_held_out_files_are_others(tmp_path, monkeypatch):
    for number in range(20):
        (tmp_path / f"m{number:02}.py").write_text(f"# {number:02}\n")
    for folder in ("site-packages", "test", "pkg"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text(f"{folder}\n")
    (tmp_path / "notes.txt").write_text("no source")
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    read = read_text.__wrapped__
    training, held_out = read(1 << 20)
    assert held_out == b"# 09\n# 19\n"
    assert training == b"".join(b"# %02d\n" % n for n in range(20) if n % 10 != 9) + b"pkg\n"
    assert sum(map(len, read(52))) == 52
    with pytest.raises(ConfigError, match="too little Python source text"):
        read(20)


def test_the_real_text_is_there():
    training, held_out = read_text(SMALL.max_text_bytes)
    assert len(training) + len(held_out) == SMALL.max_text_bytes
    assert b"import " in training and b"def " in held_out


def test_unigram_entropy():
    assert unigram_entropy(bytes(range(256)) * 3) == pytest.approx(math.log(256))
    assert unigram_entropy(b"aaaa") == 0
    text = read_text(SMALL.max_text_bytes)[1]
    shares = [count / len(text) for count in Counter(text).values()]
    assert unigram_entropy(text) == pytest.approx(-sum(p * math.log(p) for p in shares))


@pytest.mark.parametrize("tied_head", [False, True])
def test_a_new_model_knows_nothing(tied_head):
    # I07: a random language model starts at log(vocabulary).
    torch.manual_seed(0)
    recipe = bytes_gpt(BytesGptConfig(tied_head=tied_head))
    model = recipe.model()
    assert (model.head.weight is model.embedding.weight) == tied_head
    assert recipe.loss(model, recipe.probe(2)).item() == pytest.approx(math.log(256), abs=0.15)


def test_a_position_sees_only_what_came_before():
    torch.manual_seed(0)
    model = bytes_gpt(SMALL).model()
    tokens = torch.randint(256, (1, 32))
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :20], after[0, :20])
    assert not torch.equal(before[0, 20], after[0, 20])


def test_optimizer_decays_matrices_alone():
    recipe = bytes_gpt(SMALL)
    model = recipe.model()
    decayed, others = recipe.optimizer(model).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {id(p) for group in (decayed, others) for p in group["params"]} == set(names)
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    assert all(p.ndim == 2 for p in decayed["params"]) and decayed["weight_decay"] > 0
    assert all(p.ndim == 1 or names[id(p)] == "position" for p in others["params"]) and others["weight_decay"] == 0


def test_learning_rate_rises_and_falls():
    recipe = bytes_gpt(SMALL)
    optimizer = recipe.optimizer(recipe.model())
    scheduler = recipe.scheduler(optimizer)
    rates = []
    for _ in range(80):
        rates.append(optimizer.param_groups[0]["lr"] / SMALL.learning_rate)
        optimizer.step()
        scheduler.step()
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(later <= earlier for earlier, later in zip(rates[5:], rates[6:], strict=False))
    assert rates[60:] == pytest.approx([0.1] * 20)


def test_probe_is_a_batch_and_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    batch = recipe.probe(3)
    assert torch.equal(torch.get_rng_state(), state)
    sample = recipe.dataset()[0]
    assert batch.shape == (3, *sample.shape) and batch.dtype == sample.dtype
    assert recipe.weight(batch) == 3 * 128
    assert torch.equal(batch, recipe.probe(3))


def test_it_learns_below_the_entropy_of_single_bytes():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recipe = bytes_gpt(SMALL)
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    scheduler = recipe.scheduler(optimizer)
    dataset, held_out = recipe.dataset(), recipe.eval_dataset()
    order = torch.randperm(len(dataset)).tolist()
    for step in range(SMALL.total_steps):
        batch = recipe.collate([dataset[index] for index in order[step * 32 : step * 32 + 32]])
        recipe.loss(model, batch).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = recipe.loss(model, recipe.collate(list(held_out))).item()
    assert loss < unigram_entropy(held_out.text) - 0.1


def test_recipe_can_be_sent_to_other_processes():
    copy = pickle.loads(pickle.dumps(recipe))
    assert copy.loss is next_byte_loss and len(copy.eval_dataset()) == BytesGptConfig().num_eval_samples


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"num_layers": 0}, "num_layers must be 1 or more"), ({"width": 30}, "width 30 is not a multiple of num_heads 4")],
)
def test_wrong_sizes(settings, message):
    with pytest.raises(ConfigError, match=message):
        BytesGptConfig(**settings)


# Finding recipes by name.

_FILE = """
from poplar.recipes.bytes_gpt import BytesGptConfig, bytes_gpt
import {sibling}

recipe = bytes_gpt(BytesGptConfig(num_layers=1))
number = 3


def make_small():
    return bytes_gpt(BytesGptConfig(num_layers=1, width=8))


def make_sized(width):
    return bytes_gpt(BytesGptConfig(width=width))


def make_nothing():
    return None


def make_trouble():
    return 1 / 0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a recipe file, a sibling that it imports, and faulty ones."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    (tmp_path / "recipe_sibling.py").write_text("")
    (tmp_path / "own_recipe.py").write_text(_FILE.format(sibling="recipe_sibling"))
    (tmp_path / "random.py").write_text(_FILE.format(sibling="recipe_sibling"))
    (tmp_path / "lacking.py").write_text(_FILE.format(sibling="no_such_library"))
    (tmp_path / "failing.py").write_text("x = 1\nraise RuntimeError('first\\nsecond')\n")
    (tmp_path / "unreadable.py").write_text("def f(:\n")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(3)\n")
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_default_recipe_by_its_name():
    assert load_recipe("poplar.recipes.bytes_gpt:recipe") is recipe


@pytest.mark.parametrize("reference", ["own_recipe.py:recipe", "own_recipe:recipe", "own_recipe.py:make_small"])
def test_recipes_of_files_and_modules(folder, reference):
    made = load_recipe(reference)
    assert isinstance(made, Recipe)
    assert len(made.model().blocks) == 1


def test_a_file_from_elsewhere_is_loaded_once_and_can_be_pickled(folder, monkeypatch):
    monkeypatch.chdir("/")
    first = load_recipe(f"{folder}/own_recipe.py:recipe")
    assert load_recipe(f"{folder}/own_recipe.py:recipe") is first
    make = sys.modules["own_recipe"].make_small
    assert pickle.loads(pickle.dumps(make)) is make


def test_a_file_named_as_a_library_does_not_take_its_place(folder):
    import random

    assert isinstance(load_recipe("random.py:recipe"), Recipe)
    assert sys.modules["random"] is random


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("own_recipe", "named as 'module:name' or 'file.py:name'; got 'own_recipe'"),
        (":recipe", "named as 'module:name'"),
        ("own_recipe.py:", "named as 'module:name'"),
        ("missing.py:recipe", "there is no recipe file 'missing.py'"),
        ("missing_module:recipe", "there is no module 'missing_module'"),
        ("poplar.nothing_here:recipe", "there is no module 'poplar.nothing_here'"),
        ("lacking.py:recipe", "ModuleNotFoundError: No module named 'no_such_library' .*lacking.py, line 3"),
        ("lacking:recipe", "'lacking' does not import: ModuleNotFoundError: No module named 'no_such_library'"),
        ("failing.py:recipe", "RuntimeError: first second .*failing.py, line 2"),
        ("failing:recipe", "RuntimeError: first second .*failing.py, line 2"),
        ("unreadable.py:recipe", "SyntaxError: .*line 1"),
        ("leaving.py:recipe", "SystemExit: 3 .*leaving.py, line 2"),
        ("own_recipe.py:recipes", "'own_recipe.py' has no 'recipes'; did you mean 'recipe'"),
        ("own_recipe.py:zzz", "has no 'zzz'; it has 'make_nothing', 'make_sized'"),
        ("own_recipe.py:number", "is of type int; expected a poplar.Recipe, or a function that returns one"),
        ("own_recipe.py:make_sized", "must be callable without arguments .*'width'"),
        ("own_recipe.py:make_nothing", "returned NoneType; expected a poplar.Recipe"),
        ("own_recipe.py:make_trouble", "failed: ZeroDivisionError: division by zero .*own_recipe.py, line 22"),
    ],
)
def test_wrong_references_are_told_in_one_line(folder, reference, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(reference)
    assert "\n" not in str(caught.value)


def test_a_file_that_failed_can_be_mended(folder):
    with pytest.raises(ConfigError):
        load_recipe("failing.py:recipe")
    (folder / "failing.py").write_text(_FILE.format(sibling="recipe_sibling"))
    assert isinstance(load_recipe("failing.py:recipe"), Recipe)
