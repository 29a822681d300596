"""``poplar report``: a run on one page."""

from __future__ import annotations

import click


@click.command()
@click.argument("run_dir", type=click.Path())
@click.option("--out", type=click.Path(dir_okay=False), help="File to write.  [default: RUN_DIR/report.html]")
def report(run_dir: str, out: str | None) -> None:
    """Write a page on the run in RUN_DIR: its plan, predicted against measured, losses, and pictures of the profile.

    One HTML file that stands alone, also of runs that have not ended. Pictures need matplotlib (extra 'plot').
    """
    from poplar import pictures
    from poplar.report import write_report

    click.echo(f"wrote {write_report(run_dir, out)}")
    if not pictures.can_draw():
        click.echo(f"without pictures: {pictures.NO_MATPLOTLIB}", err=True)
