"""`python -m embedctl_workers`: what `embedctl worker` runs."""

from embedctl_workers.commands.worker import main

main(prog_name="embedctl worker")
