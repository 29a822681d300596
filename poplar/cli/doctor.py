"""``poplar doctor``: devices, versions, links, and a self-test of every collective within a time limit."""

from __future__ import annotations

import platform
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from poplar import __version__
from poplar.cli.options import cluster_options, show
from poplar.errors import CommunicationError
from poplar.tables import format_bytes, format_table

if TYPE_CHECKING:
    from poplar.device import Device
    from poplar.self_test import Check

P2P_HINT = (
    "mixed or consumer cards often cannot copy to each other: try NCCL_P2P_DISABLE=1 (then NCCL_SHM_DISABLE=1), or "
    "--backend gloo"
)


@dataclass(frozen=True, kw_only=True)
class _RankFacts:
    """What a rank says of itself, ready to be shown."""

    host: str
    card: str
    vendor: str
    identity: str
    usable: str
    driver: str
    has_code: str
    """Whether this torch has machine code for the card."""


@dataclass(frozen=True, kw_only=True)
class _Diagnosis:
    """What the ranks found together."""

    backend: str
    facts: list[_RankFacts]
    checks: list[Check]
    bandwidth: dict[tuple[int, int], float]


@click.command()
@cluster_options
@click.option(
    "--time-limit-s",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="The self-test fails after this; a broken link hangs.",
)
def doctor(nproc: int | None, time_limit_s: float, **values: Any) -> None:
    """Check devices, versions, links and every collective; exit code 1 if something is wrong."""
    from poplar.cli.options import settle_ranks
    from poplar.fit_config import FitConfig
    from poplar.launch import run_ranks

    show(_versions())
    if nproc is None and values["emulate"] is None and not _num_cards():
        nproc = 2
    num_ranks = settle_ranks(values, "", nproc)
    config = FitConfig(global_batch_size=1, **values)
    config.check_world_size(num_ranks)
    found: _Diagnosis = run_ranks(diagnose_rank, num_ranks, config, time_limit_s)
    show(_describe(found))
    problems = _problems(found)
    if problems:
        raise CommunicationError("; ".join(problems))
    show("all well")


def diagnose_rank(config: Any, time_limit_s: float) -> _Diagnosis:
    """Examine one rank, and the links together with the others. Collective."""
    import torch.distributed as dist

    from poplar.launch import end_rank
    from poplar.self_test import check_collectives, measure_bandwidth
    from poplar.training import join, leave

    error = CommunicationError(f"the self-test did not end within {time_limit_s:g} s; {P2P_HINT}")
    watchdog = threading.Timer(time_limit_s, end_rank, [error])
    watchdog.daemon = True
    watchdog.start()
    comm, device = join(config)
    diagnosis = _Diagnosis(
        backend=dist.get_backend() if dist.is_initialized() else "none (one rank)",
        facts=comm.gather_objects(_facts(device)),
        checks=check_collectives(comm, device.torch_device),
        bandwidth=measure_bandwidth(device.torch_device) if comm.world_size > 1 else {},
    )
    leave(comm)
    watchdog.cancel()
    return diagnosis


def _facts(device: Device) -> _RankFacts:
    import torch

    from poplar.device import query_driver
    from poplar.self_test import has_code_for

    report = query_driver(device.device_id) if device.device_id and not device.is_emulated else None
    has_code = "-"
    if device.torch_device.type == "cuda":
        properties = torch.cuda.get_device_properties(device.torch_device)
        architecture = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
        architecture = architecture or f"sm_{properties.major}{properties.minor}"
        verdict = "yes" if has_code_for(architecture, torch.cuda.get_arch_list()) else "NO"
        has_code = f"{verdict} ({architecture})"
    limit = device.memory_limit_bytes
    return _RankFacts(
        host=socket.gethostname(),
        card=device.name + (" (emulated)" if device.is_emulated else ""),
        vendor=device.vendor,
        identity=device.device_id or "-",
        usable=format_bytes(limit) if limit is not None else "-",
        driver=report.driver_version if report is not None else "-",
        has_code=has_code,
    )


def _num_cards() -> int:
    import torch

    return torch.cuda.device_count()


def _versions() -> str:
    import torch

    toolkit = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda or '-'}"
    nccl = "-"
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return (
        f"poplar {__version__}, torch {torch.__version__}, {toolkit}, NCCL {nccl}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}"
    )


def _describe(found: _Diagnosis) -> str:
    header = ("rank", "host", "card", "may use", "driver", "code in torch", "identity")
    rows = [
        (str(rank), fact.host, fact.card, fact.usable, fact.driver, fact.has_code, fact.identity)
        for rank, fact in enumerate(found.facts)
    ]
    parts = [format_table(header, rows), f"backend: {found.backend}"]
    checks = [(check.name, f"{check.seconds * 1e3:.1f} ms", check.problem or "right") for check in found.checks]
    parts.append(format_table(("collective", "time", "values"), checks))
    if found.bandwidth:
        links = [
            (f"{low} - {high}", f"{format_bytes(speed)}/s") for (low, high), speed in sorted(found.bandwidth.items())
        ]
        parts.append(format_table(("ranks", "bandwidth"), links))
    return "\n" + "\n\n".join(parts) + "\n"


def _problems(found: _Diagnosis) -> list[str]:
    without = [str(rank) for rank, fact in enumerate(found.facts) if fact.has_code.startswith("NO")]
    problems = []
    if without:
        problems.append(
            f"this torch has no machine code for the cards of ranks {', '.join(without)}; install a build that has"
        )
    wrong = [f"{check.name}: {check.problem}" for check in found.checks if check.problem]
    if wrong:
        problems.append("; ".join(wrong) + f"; {P2P_HINT}")
    return problems
