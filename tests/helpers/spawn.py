"""Run one function on several gloo ranks.

The ranks are forked from a server process that has imported torch and poplar but started no threads, which takes
milliseconds where a fresh interpreter takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# The first optimizer of a process imports torch._dynamo, which takes seconds.
_PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "numpy", "scipy.interpolate", "poplar.errors"]
_CONTEXT.set_forkserver_preload(_PRELOAD)


class RankFailure(AssertionError):
    """A rank raised; the message holds every rank's traceback."""


def _rank_main(function: Callable[..., Any], rank: int, world_size: int, store: str, args: tuple[Any, ...], pipe: Any):
    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), POPLAR_TEST_STORE=store)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=40),
        )
        result = function(rank, world_size, *args)
        dist.barrier()
        pipe.send(("ok", result))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    finally:
        pipe.close()
        # The process ends here; a group whose peer has failed may never be destroyed in good order.
        os._exit(0)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` on ``world_size`` gloo ranks; return what each returned.

    ``function`` must be importable (module level); results are pickled. Warnings are errors inside the ranks.

    Raises:
        RankFailure: a rank raised, died, or did not end within ``timeout_s``.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        workers = []
        for rank in range(world_size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_rank_main, args=(function, rank, world_size, store, args, sender), daemon=True
            )
            process.start()
            sender.close()
            workers.append((process, receiver))
        deadline = time.monotonic() + timeout_s
        outcomes: list[tuple[str, Any]] = []
        for process, receiver in workers:
            try:
                if receiver.poll(max(0.0, deadline - time.monotonic())):
                    outcomes.append(receiver.recv())
                else:
                    outcomes.append(("error", f"no result within {timeout_s} s"))
            except EOFError:
                process.join(1)
                outcomes.append(("error", f"died with exit code {process.exitcode}"))
        for process, _ in workers:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
    failures = [f"--- rank {rank}:\n{value}" for rank, (kind, value) in enumerate(outcomes) if kind == "error"]
    if failures:
        raise RankFailure("\n" + "\n".join(failures))
    return [value for _, value in outcomes]


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
