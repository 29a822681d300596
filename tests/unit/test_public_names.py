"""The public names are the listed ones, sorted, and each can be imported."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import poplar
from poplar import errors


def test_names_are_sorted_and_each_has_a_home():
    assert poplar.__all__ == sorted(poplar.__all__)
    assert set(poplar.__all__) == set(poplar._HOME)
    assert list(poplar._HOME) == sorted(poplar._HOME)
    assert dir(poplar) == poplar.__all__


@pytest.mark.parametrize("name", poplar.__all__)
def test_name_can_be_imported_from_its_home(name):
    value = getattr(poplar, name)
    assert value.__module__ == poplar._HOME[name]
    assert inspect.getdoc(value), f"{name} has no docstring"


def test_every_error_is_public_and_drawn_in_the_tree():
    own = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, errors.PoplarError)
    }
    assert own <= set(poplar.__all__)
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in own)


def test_importing_poplar_loads_nothing_heavy():
    code = "import sys, poplar; print([m for m in ('torch', 'numpy', 'scipy', 'click') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        poplar.nonsense  # noqa: B018
