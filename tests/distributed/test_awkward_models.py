"""Every model of ``helpers/models.py`` times stages, world sizes, even and uneven shards, and random splits.

One spawn runs many lines of the table; all failures are shown, each by model, stage and shards.
"""

from __future__ import annotations

import warnings

import pytest

from poplar.config import ZERO_STAGES
from tests.helpers.models import CASES, Case
from tests.helpers.parity import check, reference, shards_to_try
from tests.helpers.spawn import run_ranks


def _run(rank: int, world_size: int, names: tuple[str, ...]) -> list[str]:
    return run_cases(rank, world_size, [case for case in CASES if case.name in names])


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    """Return what failed. Stops at the first error that is not a comparison's, since ranks may then be apart."""
    failures: list[str] = []
    # Dynamo looks at .grad of whatever it meets, and silences this warning in its own way, which "error" undoes.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    for case in cases:
        if case.is_slow and world_size != 2:
            continue
        expected = reference(case)
        for stage in (0, 3) if case.is_slow else ZERO_STAGES:
            for ratios in shards_to_try(stage, world_size):
                try:
                    check(rank, world_size, case, stage, ratios, expected)
                except AssertionError as error:
                    failures.append(str(error))
                except Exception as error:
                    text = f"{case.name}, z{stage}, shards {ratios or 'equal'} raised; failed before: {failures}"
                    raise RuntimeError(text) from error
    return failures


@pytest.mark.parametrize(("world_size", "part"), [(size, part) for size in (1, 2, 3) for part in range(size)])
def test_every_model_equals_one_process(world_size: int, part: int) -> None:
    names = tuple(case.name for case in CASES[part::world_size])
    for failures in run_ranks(_run, world_size, names, timeout_s=110):
        assert not failures, "\n".join(failures)
