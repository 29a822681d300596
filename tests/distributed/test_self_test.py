"""What ``poplar doctor`` checks: values through every collective, links, makers, machine code."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from poplar.errors import CommunicationError
from poplar.self_test import (
    check_collectives,
    check_vendors,
    has_code_for,
    measure_bandwidth,
)
from poplar.zero.comm import LoopbackComm, ProcessGroupComm
from tests.helpers.spawn import run_ranks


class _ZeroingComm(ProcessGroupComm):
    """A link that delivers zeros to the last rank, as broken peer-to-peer copies do."""

    def all_reduce(self, full, name=""):
        work = super().all_reduce(full, name)
        work.wait()
        if self.rank == self.world_size - 1:
            full[7] = 0
        return work


def _self_test(rank, world_size):
    checks = check_collectives(ProcessGroupComm())
    broken = {check.name: check.problem for check in check_collectives(_ZeroingComm())}
    return checks, broken, measure_bandwidth(), dist.get_world_size()


@pytest.mark.parametrize("world_size", [1, 3])
def test_good_links_pass_and_a_tampered_value_is_found_on_its_rank(world_size):
    """I05."""
    for checks, broken, bandwidth, _ in run_ranks(_self_test, world_size):
        assert [check.problem for check in checks] == [""] * len(checks)
        assert len(checks) == (7 if world_size > 1 else 5)
        assert all(check.seconds > 0 for check in checks)
        problems = {name: problem for name, problem in broken.items() if problem}
        assert set(problems) == {"all-reduce"}
        assert problems["all-reduce"].startswith(f"rank {world_size - 1}: expected ")
        assert "got 0 (1 wrong)" in problems["all-reduce"]
        assert set(bandwidth) == {(low, high) for high in range(world_size) for low in range(high)}
        assert all(speed > 1e6 for speed in bandwidth.values())


def test_a_communicator_that_talks_to_nobody_fails_every_check():
    checks = check_collectives(LoopbackComm(0, 2))
    failing = {check.name for check in checks if check.problem}
    assert failing >= {"votes on the host", "all-gather, equal shards", "reduce-scatter, equal shards", "all-reduce"}


def test_makers_are_not_mixed_in_one_native_group():
    """I04."""
    with pytest.raises(CommunicationError, match="nvidia on rank 0, amd on rank 2; use --backend gloo"):
        check_vendors(["nvidia", "nvidia", "amd"], "nccl")
    check_vendors(["nvidia", "amd", "cpu"], "gloo")
    check_vendors(["nvidia", "nvidia"], "nccl")


@pytest.mark.parametrize(
    ("architecture", "built_for", "runs"),
    [
        ("sm_75", ["sm_70", "sm_75"], True),
        ("sm_86", ["sm_80"], True),
        ("sm_80", ["sm_86"], False),
        ("sm_61", ["sm_75", "sm_80", "compute_90"], False),
        ("sm_120", ["sm_90", "compute_90"], True),
        ("sm_90", ["sm_80", "sm_90a"], True),
        ("sm_100", ["sm_90a"], False),
        ("gfx90a:sramecc+:xnack-", ["gfx90a", "gfx942"], True),
        ("gfx1100", ["gfx90a"], False),
    ],
)
def test_machine_code_is_matched_to_the_card(architecture, built_for, runs):
    assert has_code_for(architecture, built_for) is runs
