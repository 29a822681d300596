"""What a person sees of a run, and what is written beside it: progress, metrics.jsonl, the run's files. Rank 0 only."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

from poplar.errors import ConfigError
from poplar.plan import write_text_atomically

_BAR_CELLS = 20
_REFRESH_S = 0.1


class Progress:
    """One line that is redrawn on a terminal; elsewhere a line about every tenth of the way.

    Args:
        total_steps: steps of the run.
        start_step: steps taken before it began.
        stream: None shows nothing.
    """

    def __init__(self, total_steps: int, start_step: int = 0, stream: IO[str] | None = sys.stderr):
        self._total, self._start = total_steps, start_step
        self._stream = stream
        self._on_terminal = stream is not None and stream.isatty()
        self._began_s = self._drawn_s = time.monotonic()
        self._every = max(1, math.ceil((total_steps - start_step) / 10))

    def show(self, step: int, loss: float, samples_per_s: float, tokens_per_s: float | None) -> None:
        """Show the state after ``step`` steps."""
        if self._stream is None:
            return
        done = step >= self._total
        now_s = time.monotonic()
        if self._on_terminal and (done or now_s - self._drawn_s >= _REFRESH_S):
            self._drawn_s = now_s
            filled = _BAR_CELLS * step // self._total
            bar = "#" * filled + "." * (_BAR_CELLS - filled)
            self._stream.write(f"\r\x1b[K[{bar}] {self._line(step, loss, samples_per_s, tokens_per_s)}")
            self._stream.write("\n" if done else "")
        elif not self._on_terminal and (done or step % self._every == 0 or step == self._start + 1):
            self._stream.write(self._line(step, loss, samples_per_s, tokens_per_s) + "\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """Print a line of its own."""
        if self._stream is not None:
            self._stream.write(("\r\x1b[K" if self._on_terminal else "") + text + "\n")
            self._stream.flush()

    def _line(self, step: int, loss: float, samples_per_s: float, tokens_per_s: float | None) -> str:
        elapsed_s = time.monotonic() - self._began_s
        left_s = elapsed_s / max(1, step - self._start) * (self._total - step)
        speed = f"  {samples_per_s:.1f} samples/s" if math.isfinite(samples_per_s) else ""
        tokens = f"  {tokens_per_s:.0f} tokens/s" if tokens_per_s is not None and math.isfinite(tokens_per_s) else ""
        return (
            f"step {step:{len(str(self._total))}}/{self._total}  loss {loss:.4f}{speed}{tokens}"
            f"  ETA {int(left_s) // 60}:{int(left_s) % 60:02d}"
        )


class RunFiles:
    """The files of a run's folder. ``run_dir`` None: nothing is written."""

    def __init__(self, run_dir: str | os.PathLike[str] | None):
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self._metrics: IO[str] | None = None
        if self.run_dir is not None:
            try:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                # Of this run alone: what an earlier one in this folder wrote does not go with the other files.
                self._metrics = open(self.run_dir / "metrics.jsonl", "w", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write the run into {str(run_dir)!r}: {error.strerror or error}") from error

    def write(self, name: str, text: str) -> None:
        """Write a whole file."""
        if self.run_dir is not None:
            write_text_atomically(self.run_dir / name, text)

    def remove(self, *names: str) -> None:
        """Remove files, where they are there."""
        if self.run_dir is not None:
            for name in names:
                (self.run_dir / name).unlink(missing_ok=True)

    def log(self, **values: Any) -> None:
        """Add a line to ``metrics.jsonl``; numbers that JSON lacks (NaN, infinity) are written as null."""
        if self._metrics is not None:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            self._metrics.write(json.dumps(finite) + "\n")
            self._metrics.flush()

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
