"""Imports go down only; the pure layer needs no torch; one module talks to the driver, one calls collectives."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import poplar

_ROOT = Path(poplar.__file__).parent
_CLI, _LAUNCH, _RUNNING, _STAGES, _DEVICE, _PURE = 5, 4, 3, 2, 1, 0
_RUNNING_MODULES = {
    "poplar.checkpoint",
    "poplar.checkpointing",
    "poplar.emulation",
    "poplar.engine",
    "poplar.loader",
    "poplar.profiler",
    "poplar.profiling",
    "poplar.recipe_loading",
    "poplar.self_test",
    "poplar.startup",
    "poplar.training",
    "poplar.training_loop",
}
_COLLECTIVES = {
    "P2POp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
}


def _layer(module: str) -> int:
    """Return the layer; a module that is named nowhere is pure, and must then do without torch."""
    top = ".".join(module.split(".")[:2])
    if top in ("poplar.cli", "poplar.__main__"):
        return _CLI
    if top == "poplar.launch":
        return _LAUNCH
    if top in _RUNNING_MODULES:
        return _RUNNING
    return {
        "poplar.zero": _STAGES,
        "poplar.device": _DEVICE,
        "poplar.rng": _DEVICE,
        "poplar.memory_meter": _DEVICE,
    }.get(top, _PURE)


def _is_pure(module: str) -> bool:
    # Recipes hold models and module_costs runs one, so they need torch; pure modules import them in functions alone.
    return _layer(module) == _PURE and not module.startswith(("poplar.recipes", "poplar.simulation.module_costs"))


def _modules() -> dict[str, ast.Module]:
    trees = {}
    for path in sorted(_ROOT.rglob("*.py")):
        parts = path.relative_to(_ROOT.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _walk(node: ast.AST, *, into_functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if _is_type_checking(child):
            continue
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not into_functions:
            continue
        yield child
        yield from _walk(child, into_functions=into_functions)


def _imports(tree: ast.Module, *, into_functions: bool = True) -> set[str]:
    """Return the modules that ``tree`` imports when run; with ``into_functions`` also those that its functions do."""
    names: set[str] = set()
    for node in _walk(tree, into_functions=into_functions):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _own_imports(tree: ast.Module, known: dict[str, ast.Module], *, into_functions: bool = True) -> set[str]:
    return {name for name in _imports(tree, into_functions=into_functions) if name in known and name != "poplar"}


def _collective_calls(tree: ast.Module) -> list[str]:
    aliases = {"torch.distributed"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases.update(a.asname for a in node.names if a.name == "torch.distributed" and a.asname)
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases.update(a.asname or a.name for a in node.names if a.name == "distributed")
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            found += [alias.name for alias in node.names if alias.name in _COLLECTIVES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _COLLECTIVES and ast.unparse(node.value) in aliases:
            found.append(node.attr)
    return found


def test_imports_go_down_only():
    modules = _modules()
    wrong = [
        f"{name} imports {target}"
        for name, tree in modules.items()
        for target in _own_imports(tree, modules)
        if _layer(target) > _layer(name)
    ]
    assert not wrong


def test_recipes_build_on_configuration_and_errors_alone():
    modules = _modules()
    allowed = ("poplar.config", "poplar.errors", "poplar.recipes")
    for name, tree in modules.items():
        if name.startswith("poplar.recipes"):
            assert all(target.startswith(allowed) for target in _own_imports(tree, modules)), name


def test_imports_at_module_level_form_no_circle():
    modules = _modules()
    graph = {name: _own_imports(tree, modules, into_functions=False) - {name} for name, tree in modules.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)  # raises CycleError on a circle


def test_pure_modules_import_neither_torch_nor_matplotlib_at_module_level():
    for name, tree in _modules().items():
        if _is_pure(name) or _layer(name) == _CLI:
            heavy = [t for t in _imports(tree, into_functions=False) if t.split(".")[0] in ("torch", "matplotlib")]
            assert not heavy, f"{name} imports {heavy}: name it in a layer above the pure one, or import later"


def test_planning_reports_and_help_load_neither_torch_nor_matplotlib():
    names = [name for name in _modules() if (_is_pure(name) or _layer(name) == _CLI) and name != "poplar.__main__"]
    code = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
    code += "print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_driver_and_collectives_have_one_caller_each():
    for name, tree in _modules().items():
        if name != "poplar.device":
            assert not {t for t in _imports(tree) if t.split(".")[0] == "pynvml"}, f"{name}: pynvml is device.py's"
        if name not in ("poplar.zero.comm", "poplar.zero.transport"):
            assert not _collective_calls(tree), (
                f"{name} calls {_collective_calls(tree)}: that is for zero/comm.py and zero/transport.py"
            )


def test_the_readers_above_see_what_they_look_for():
    tree = ast.parse(
        "import torch.distributed as dist\nfrom torch.distributed import all_reduce\n"
        "def later():\n    import pynvml\n    from poplar.engine import Engine\n"
        "    dist.isend(x, 1)\n    comm.barrier()\n"
    )
    assert _collective_calls(tree) == ["all_reduce", "isend"]
    assert "pynvml" in _imports(tree) and "pynvml" not in _imports(tree, into_functions=False)
    assert "poplar.engine" in _own_imports(tree, {"poplar.engine": tree})
    hidden = ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n")
    assert _imports(hidden) == {"typing", "typing.TYPE_CHECKING"}
    assert _layer("poplar.cli.train") > _layer("poplar.training") > _layer("poplar.zero.comm") > _layer("poplar.device")
    assert all(map(_is_pure, ("poplar.pictures", "poplar.planning.record", "poplar.report", "poplar.run_dir")))
    assert _layer("poplar.plan") == _PURE and _is_pure("poplar.catalog") and not _is_pure("poplar.recipes.bytes_gpt")
