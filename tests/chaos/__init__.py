"""Chaos: random faults hit real processes; then every record is counted. See `python -m tests.chaos --help`.

Its clock is the machine's: faults last for random times, and what must end is waited for as long as the product's own
times allow.
"""
