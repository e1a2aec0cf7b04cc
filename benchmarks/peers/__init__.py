"""Embedding engines on the CPU, each in an environment of its own, driven side by side by `benchmarks.bench_peers`."""
