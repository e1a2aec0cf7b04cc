"""The only folder on a peer's PYTHONPATH: it holds the package of adapters alone, so that it hides no other package."""
