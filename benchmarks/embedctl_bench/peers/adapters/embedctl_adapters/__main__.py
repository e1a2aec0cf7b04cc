"""Serve one process of a system: `python -m embedctl_adapters`, started by the parent in the system's environment."""

from .serving import main

if __name__ == "__main__":  # a process that a library starts may import this module again
    main()
