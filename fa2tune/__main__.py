"""``python -m fa2tune``: the command line, also from a bare checkout."""

from fa2tune.cli import main

main(prog_name="fa2tune")
