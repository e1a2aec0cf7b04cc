"""Compares a corpus with a destination, and copies what is known, such as from a cache. The rest is encoded."""
