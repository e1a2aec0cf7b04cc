"""sentence-transformers on torch, on CPUs."""
