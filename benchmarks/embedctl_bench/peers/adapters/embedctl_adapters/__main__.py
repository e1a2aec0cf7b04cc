"""Serve one system: `python -m embedctl_adapters`, started by the parent in the system's environment."""

from .serving import main

if __name__ == "__main__":  # each process of a pool imports this module again
    main()
