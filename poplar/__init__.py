"""Poplar: data-parallel training on unlike GPUs.

Names are imported when first used, so that planning and ``poplar --help`` need no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "CheckpointError": "poplar.errors",
    "ClusterProfile": "poplar.plan",
    "CommunicationError": "poplar.errors",
    "ConfigError": "poplar.errors",
    "Engine": "poplar.engine",
    "FitResult": "poplar.training",
    "InfeasiblePlanError": "poplar.errors",
    "ModelError": "poplar.errors",
    "NonFiniteError": "poplar.errors",
    "Plan": "poplar.plan",
    "PlanMismatchError": "poplar.errors",
    "PlannedLoader": "poplar.loader",
    "PoplarError": "poplar.errors",
    "Prediction": "poplar.plan",
    "ProfileError": "poplar.errors",
    "RankFailedError": "poplar.errors",
    "RankPlan": "poplar.plan",
    "RankProfile": "poplar.plan",
    "Recipe": "poplar.config",
    "ScheduleError": "poplar.errors",
    "ShapeError": "poplar.errors",
    "StepError": "poplar.errors",
    "StepRecord": "poplar.planning.record",
    "StepResult": "poplar.engine",
    "allocate": "poplar.allocator",
    "fit": "poplar.training",
    "initialize": "poplar.startup",
    "make_plan": "poplar.profiler",
    "profile": "poplar.profiler",
}

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "ClusterProfile",
    "CommunicationError",
    "ConfigError",
    "Engine",
    "FitResult",
    "InfeasiblePlanError",
    "ModelError",
    "NonFiniteError",
    "Plan",
    "PlanMismatchError",
    "PlannedLoader",
    "PoplarError",
    "Prediction",
    "ProfileError",
    "RankFailedError",
    "RankPlan",
    "RankProfile",
    "Recipe",
    "ScheduleError",
    "ShapeError",
    "StepError",
    "StepRecord",
    "StepResult",
    "allocate",
    "fit",
    "initialize",
    "make_plan",
    "profile",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'poplar' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
