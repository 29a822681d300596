"""Every model of ``helpers/models.py`` times stages 0-3 times world sizes times even and uneven shards times random splits.

One spawn a world size runs the whole table; all failures are shown, each by model, stage and shards.
"""

from __future__ import annotations

import warnings

import pytest
import torch._dynamo

from poplar.config import ZERO_STAGES
from tests.helpers.models import CASES, Case
from tests.helpers.parity import check, reference, shards_to_try
from tests.helpers.spawn import run_ranks


def _run(rank: int, world_size: int, names: tuple[str, ...]) -> list[str]:
    return run_cases(rank, world_size, [case for case in CASES if not names or case.name in names])


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    """Return what failed. Stops at the first error that is not a comparison's, since ranks may then be apart."""
    failures: list[str] = []
    # Dynamo looks at .grad of whatever it meets, and silences this warning in its own way, which "error" undoes.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    torch._dynamo.config.recompile_limit = 64  # a process meets the same modules many times
    for case in cases:
        expected = reference(case)
        for stage in ZERO_STAGES:
            for ratios in shards_to_try(stage, world_size):
                try:
                    check(rank, world_size, case, stage, ratios, expected)
                except AssertionError as error:
                    failures.append(str(error))
                except Exception as error:
                    text = f"{case.name}, z{stage}, shards {ratios or 'equal'} raised; failed before: {failures}"
                    raise RuntimeError(text) from error
    return failures


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_model_equals_one_process(world_size: int) -> None:
    for failures in run_ranks(_run, world_size, (), timeout_s=110):
        assert not failures, "\n".join(failures)
