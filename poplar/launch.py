"""Start the ranks of one machine with PyTorch's own elastic launch, and show the error that came first.

Under torchrun or Slurm the ranks are there already, and ``run_ranks`` only calls the function.

[Note: the first error]
When one rank fails, the others fail too, a moment later and with less to say ("connection closed by peer"). Elastic
launch keeps the error of one rank, whichever it happens to see first. So every rank writes its own error with the time
of it, and the parent shows the earliest; an error that says "another rank failed" counts only if there is nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from poplar import errors
from poplar.config import debug_from_environment
from poplar.host import usable_cores
from poplar.plan import write_text_atomically
from poplar.zero.comm import launcher_environment

SHUTDOWN_TIMEOUT_S = 10
"""How long ranks that are told to end may take before they are killed."""

_KILLED_HINT = "; the system kills processes when the machine is out of memory, and dmesg tells"
_LOST_CONNECTION = r"[Cc]onnection (closed|reset|refused)|Broken pipe|remote process exited"

_TALKERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
"""Loggers that tell of every rank they end."""
_OWN_FILES = (__file__, record.__code__.co_filename)
"""What is on the stack of every rank, and left out of its traceback."""

_report_folder: str | None = None  # in a rank that ``run_ranks`` has started


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What a failed rank left behind."""

    rank: int
    time_s: float
    """Seconds since the epoch."""
    kind: str
    """Class of the exception."""
    message: str
    details: str
    """The traceback; empty for an error that speaks for itself."""


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> Any:
    """Call ``function(*args)`` on every rank; return what rank 0 (or this process, under a launcher) returned.

    Args:
        function: defined at module level, so that a fresh process can import it.
        num_ranks: processes to start; not looked at under a launcher, which has started them.
        args: picklable.

    Raises:
        PoplarError: what the first failing rank raised.
        RankFailedError: the first failing rank raised something else, or was killed.
        KeyboardInterrupt: interrupted.
    """
    if launcher_environment() is not None:
        return record(function)(*args)
    with tempfile.TemporaryDirectory(prefix="poplar-") as folder, _elastic_settings(num_ranks):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=f"poplar-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=os.path.join(folder, "elastic")),
        )
        try:
            return elastic_launch(config, _rank_main)(function, args, folder)[0]
        except SignalException as interruption:
            if interruption.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + interruption.sigval) from None
        except ChildFailedError as failure:
            _raise_first(_read_reports(folder), failure, num_ranks)


def end_rank(error: errors.PoplarError) -> NoReturn:
    """End this rank at once, from any thread, also while it hangs in a collective; ``error`` is what the user sees."""
    if _report_folder is not None:
        _write_report(error, _report_folder)
    else:
        sys.stderr.write(f"poplar: error: {error}\n")
    sys.stderr.flush()
    os._exit(1)


def _rank_main(function: Callable[..., Any], args: tuple[Any, ...], folder: str) -> Any:
    # Ctrl-C reaches every process of the terminal, and the end of the parent arrives as the same signal: end at once
    # and without a word, also when waiting inside a collective, where no Python handler would run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    global _report_folder
    _report_folder = folder
    try:
        return record(_without_exits(function))(*args)
    except BaseException as error:
        _write_report(error, folder)
        sys.stdout.flush()
        sys.stderr.flush()
        # The usual way out would wait for threads of a process group whose peers may be gone.
        os._exit(1)


def _without_exits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with a SystemExit as an error: elastic launch takes ``sys.exit(0)`` for a rank that is done,
    and the others would wait for it in their next collective."""

    def called(*args: Any) -> Any:
        try:
            return function(*args)
        except SystemExit as error:
            raise errors.RankFailedError(
                f"rank {os.environ.get('RANK', '0')} was ended by sys.exit({error.code!r}) in the recipe; raise an "
                "error instead, so that the other ranks hear of it"
            ) from error

    return called


def _write_report(error: BaseException, folder: str) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    details = "" if isinstance(error, errors.PoplarError) else "".join(lines).rstrip()
    report = _Report(
        rank=int(os.environ.get("RANK", "0")),
        time_s=time.time(),
        kind=type(error).__name__,
        message=str(error),
        details=details,
    )
    write_text_atomically(os.path.join(folder, f"rank{report.rank}.json"), json.dumps(asdict(report)))


def _read_reports(folder: str) -> list[_Report]:
    return [_Report(**json.loads(path.read_text(encoding="utf-8"))) for path in Path(folder).glob("rank*.json")]


def _raise_first(reports: list[_Report], failure: ChildFailedError, num_ranks: int) -> NoReturn:
    rank, process = failure.get_first_failure()
    if process.exitcode == -signal.SIGINT:
        raise KeyboardInterrupt from None
    if process.exitcode < 0:
        raise errors.RankFailedError(f"rank {rank} was ended by {process.signal_name()}{_KILLED_HINT}") from None
    if not reports:
        raise errors.RankFailedError(f"rank {rank} ended with exit code {process.exitcode} and no message") from None
    first = min(reports, key=lambda report: (report.kind == errors.StepError.__name__, report.time_s))
    silent = sorted(set(range(num_ranks)) - {report.rank for report in reports})
    if silent and re.search(_LOST_CONNECTION, first.message):
        ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        raise errors.RankFailedError(
            f"rank {first.rank} lost its connection, and {ranks} left no message{_KILLED_HINT}"
        ) from None
    known = getattr(errors, first.kind, None)
    if isinstance(known, type) and issubclass(known, errors.PoplarError):
        raise known(first.message) from None
    raise errors.RankFailedError(f"rank {first.rank}: {first.kind}: {first.message}", first.details) from None


@contextmanager
def _elastic_settings(num_ranks: int) -> Iterator[None]:
    """Share the cores out among the ranks, bound their end, and keep elastic launch from printing its own account."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, int(usable_cores()) // num_ranks)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_TIMEOUT_S),
    }
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_TALKERS)]
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    os.environ.update(added)
    if not debug_from_environment():
        for logger in levels:
            logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        for name in added:
            os.environ.pop(name, None)
