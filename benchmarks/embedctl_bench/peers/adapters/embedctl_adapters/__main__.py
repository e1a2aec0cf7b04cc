"""Serve one process of a system: `python -m embedctl_adapters`, started by the parent in the system's environment."""

from .serving import main

main()
