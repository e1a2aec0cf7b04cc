"""Chaos: faults at random on real processes, and then a count of every record: `python -m tests.chaos --help`."""
