"""Chaos: random faults hit real processes; then every record is counted. See `python -m tests.chaos --help`."""
