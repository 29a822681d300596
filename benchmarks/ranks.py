"""Ranks on this machine: new processes that join one process group and run one function."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    admit: Callable[[int, int], None] | None = None,
    backend: str = "gloo",
    timeout_s: float = 6 * 3600,
) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` in ``world_size`` new processes; return what each returned.

    Args:
        function: of a module that can be imported.
        admit: called here with (rank, process id) for every process that has been started.

    Raises:
        RuntimeError: a rank raised or died, or time is up; the others are ended.
    """
    # Read when torch is loaded: without it, every start of the profiler prints lines.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    context = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(prefix="poplar-benchmark-")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers, pipes = [], []
    patience_s = 0.0  # of a rank whose fellow has failed
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            call = (function, rank, world_size, backend, os.path.join(folder, "store"), port, args, sender)
            worker = context.Process(target=_rank_main, args=call, daemon=True)
            worker.start()
            sender.close()
            workers.append(worker)
            pipes.append(receiver)
            if admit is not None:
                assert worker.pid is not None
                admit(rank, worker.pid)
        results = _collect(pipes, time.monotonic() + timeout_s)
        patience_s = 5.0
        return results
    finally:
        for worker in workers:
            worker.join(patience_s)
            if worker.is_alive():
                worker.kill()
                worker.join()
        shutil.rmtree(folder, ignore_errors=True)


def _collect(pipes: Sequence[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready: list[Any] = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError("the ranks did not end in time")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                is_well, value = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if not is_well:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    backend: str,
    store: str,
    port: int,
    args: tuple[Any, ...],
    pipe: Any,
) -> None:
    # FSDP2 calls functions that torch calls deprecated: printing that over and over would be timed with it.
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=30),
        )
        result = function(rank, world_size, *args)
        dist.barrier()
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        # A group whose peer has failed may never be destroyed in good order.
        os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
