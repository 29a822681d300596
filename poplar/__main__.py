"""``python -m poplar``: the command line, for launchers that take a module (``torchrun -m poplar train ...``)."""

from poplar.cli import main

main(prog_name="poplar")
