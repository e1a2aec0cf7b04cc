"""Explores interleavings of all actors that touch a job, with the real scripts on a real Redis.

Run it with ``python -m tests.explorer --help``. ``machine.py`` explains how it goes through states.
"""
