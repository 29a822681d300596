"""The command line: ``poplar COMMAND``. Commands are imported when they run, so ``poplar --help`` needs no torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from poplar import __version__
from poplar.errors import PoplarError, RankFailedError

# Command: its module (the command has the same name there) and the line of help that the list shows.
_COMMANDS = {
    "advise": ("poplar.cli.simulate", "Tell what each card adds, which stage to take, and what binds."),
    "doctor": ("poplar.cli.doctor", "Check devices, versions, links and every collective."),
    "plan": ("poplar.cli.plan", "Choose each rank's batches, and show what they are predicted to give."),
    "profile": ("poplar.cli.profile", "Measure each card: time and memory by batch size."),
    "report": ("poplar.cli.report", "Write a run's plan, prediction, measurements and pictures on one page."),
    "simulate": ("poplar.cli.simulate", "Predict training on cards that you do not have."),
    "train": ("poplar.cli.train", "Profile, plan and train."),
}
INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended: 128 + SIGINT."""


class _Failure(click.ClickException):
    """An error that is told in one line."""

    def __init__(self, message: str, exit_code: int, details: str = ""):
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # one class for both kinds of exit
        self._details = details

    def show(self, file: IO[Any] | None = None) -> None:
        if self._details:
            click.echo(self._details, file=file or sys.stderr)
        click.echo(f"poplar: error: {self.message}", file=file or sys.stderr)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except _Failure:
        raise
    except RankFailedError as error:
        raise _Failure(str(error), 1, error.details) from error
    except PoplarError as error:
        raise _Failure(str(error), 1) from error
    except click.UsageError as error:
        where = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        raise _Failure(error.format_message().rstrip(".") + where, error.exit_code) from error
    except KeyboardInterrupt:
        raise _Failure("interrupted", INTERRUPTED) from None


class _LazyGroup(click.Group):
    """A group that imports a command's module when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        return getattr(importlib.import_module(_COMMANDS[cmd_name][0]), cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        with _errors_in_one_line():
            return super().invoke(ctx)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="poplar")
def main() -> None:
    """Train on unlike GPUs: each card gets the batches that make the whole cluster fastest.

    `poplar train` alone trains a small language model on text that this machine has.
    """
