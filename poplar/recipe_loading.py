"""Find a recipe by the name that the command line was given: ``module:name`` or ``file.py:name``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from poplar.config import Recipe
from poplar.errors import ConfigError


def load_recipe(reference: str) -> Recipe:
    """Return the recipe that ``reference`` names.

    Args:
        reference: ``module:name`` or ``file.py:name``; the name is that of a ``Recipe``, or of a function without
            arguments that returns one. A module is looked for in the working directory too, and what a file imports
            in the file's folder too.

    Raises:
        ConfigError: no such file, module or name, it does not import, or it is not a recipe.
    """
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ConfigError(f"a recipe is named as 'module:name' or 'file.py:name'; got {reference!r}")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    return _as_recipe(_look_up(module, name, place), reference)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no recipe file {str(path)!r} (looked from {os.getcwd()!r})")
    path = path.resolve()
    _search_in(path.parent)
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if known is not None or name in sys.stdlib_module_names or not name.isidentifier():
        name = "recipe_file_" + re.sub(r"\W", "_", name)  # the plain name is another module's, or none
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as dataclasses and pickle look modules up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"the recipe file {str(path)!r} does not import: {_in_one_line(error, path)}") from error
    return module


def _load_module(name: str) -> ModuleType:
    _search_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            file = f"{name}.py" if os.path.exists(f"{name}.py") else "folder/file.py"
            raise ConfigError(f"there is no module {name!r}; a recipe in a file is named as '{file}:name'") from error
        raise ConfigError(f"the recipe module {name!r} does not import: {_in_one_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"the recipe module {name!r} does not import: {_in_one_line(error)}") from error


def _search_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _look_up(module: ModuleType, name: str, place: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        names = [known for known, value in vars(module).items() if _may_be_recipe(known, value, module)]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        if not near and names:
            hint = f"; it has {', '.join(map(repr, sorted(names)[:5]))}"
        raise ConfigError(f"{place!r} has no {name!r}{hint}") from None


def _may_be_recipe(name: str, value: Any, module: ModuleType) -> bool:
    if name.startswith("_"):
        return False
    return isinstance(value, Recipe) or (inspect.isfunction(value) and value.__module__ == module.__name__)


def _as_recipe(value: Any, reference: str) -> Recipe:
    if isinstance(value, Recipe):
        return value
    if not callable(value):
        raise ConfigError(
            f"{reference!r} is of type {type(value).__name__}; expected a poplar.Recipe, or a function that returns one"
        )
    try:
        inspect.signature(value).bind()
    except TypeError as error:
        raise ConfigError(f"{reference!r} must be callable without arguments to give a recipe: {error}") from None
    except ValueError:
        pass  # some builtins do not tell their signature; the call will
    try:
        made = value()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{reference!r} failed: {_in_one_line(error)}") from error
    if not isinstance(made, Recipe):
        raise ConfigError(f"{reference!r} returned {type(made).__name__}; expected a poplar.Recipe")
    return made


def _in_one_line(error: BaseException, path: Path | None = None) -> str:
    """Return what went wrong and where: the last line of the user's own code that the traceback passed."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):
        return text  # says its own place
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    if path is not None:
        frames = [frame for frame in frames if frame.filename == str(path)] or frames
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else text
