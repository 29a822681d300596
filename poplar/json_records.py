"""Records as JSON that says what it is and in which version: ``{"kind": "poplar-plan", "version": 1, ...}``.

    record -> dump_record() -> file -> parse_record() -> build_record(), once for each record in it -> record

A file of another kind or version is refused, since its numbers would mean something else.
"""

from __future__ import annotations

import json
import math
import types
from dataclasses import asdict, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from poplar.errors import ConfigError

_LARGEST = 2**63
"""Neither arrays nor arithmetic take larger numbers."""


def dump_record(kind: str, version: int, record: Any) -> str:
    """Return a dataclass as JSON."""
    return json.dumps({"kind": f"poplar-{kind}", "version": version, **asdict(record)}, indent=1) + "\n"


def parse_record(kind: str, version: int, text: str) -> dict[str, Any]:
    """Return the fields that ``dump_record`` wrote.

    Raises:
        ConfigError: not JSON, of another kind, or of a version this release does not read.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"this is not a {kind} in JSON: {error}") from error
    if not isinstance(data, dict) or data.pop("kind", None) != f"poplar-{kind}":
        raise ConfigError(f'this JSON is not a Poplar {kind}: it has no "kind": "poplar-{kind}"')
    got = data.pop("version", None)
    if got != version:
        raise ConfigError(f"the {kind} has version {got!r}, this release reads version {version}; make it anew")
    return data


def build_record(record: type[Any], data: Any) -> Any:
    """Make a dataclass of its fields.

    Raises:
        ConfigError: not an object, a field that ``record`` does not know, one that is missing, or one of another type
            than its annotation says.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{record.__name__}: expected an object, got {type(data).__name__}")
    known = {field.name for field in fields(record)}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ConfigError(f"{record.__name__}: unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}")
    hints = get_type_hints(record)
    for name, value in data.items():
        if not _fits(value, hints[name]):
            text = repr(value)
            raise ConfigError(
                f"{record.__name__}.{name}: expected {_named(hints[name])}, got "
                f"{text if len(text) < 80 else text[:77] + '...'}"
            )
    try:
        return record(**data)
    except TypeError as error:
        raise ConfigError(f"{record.__name__}: {error}") from error


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value out of JSON, where tuples are lists, is what an annotation says; NaN is no number."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            return False
        if len(inner) == 2 and inner[1] is Ellipsis:
            return all(_fits(item, inner[0]) for item in value)
        return len(value) == len(inner) and all(map(_fits, value, inner))
    if hint is type(None):
        return value is None
    if hint in (int, float):
        is_number = isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
        return is_number and abs(value) < _LARGEST and math.isfinite(value)
    return isinstance(value, hint)


def _named(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
