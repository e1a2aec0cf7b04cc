"""`python -m embedctl`: the command line."""

from embedctl.cli import main

main(prog_name="embedctl")
