"""Explores interleavings of everybody who touches a job, with the real scripts on a real Redis.

Run it with ``python -m tests.explorer --help``; ``machine.py`` says how it goes through states.
"""
