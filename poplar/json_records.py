"""Records as JSON that says what it is and in which version: ``{"kind": "poplar-plan", "version": 1, ...}``.

    record -> dump_record() -> file -> parse_record() -> build_record(), once for each record in it -> record

A file of another kind or version is refused, since its numbers would mean something else.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from poplar.errors import ConfigError


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
    except ValueError as error:
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
        ConfigError: not an object, a field that ``record`` does not know, or one that is missing.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{record.__name__}: expected an object, got {type(data).__name__}")
    known = {field.name for field in fields(record)}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ConfigError(f"{record.__name__}: unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}")
    try:
        return record(**data)
    except TypeError as error:
        raise ConfigError(f"{record.__name__}: {error}") from error
