"""Other systems, each in an environment of its own, driven side by side by `embedctl bench` and `benchmarks/`.

`serving` and the adapters run in those environments, where embedctl is not installed: they import each other relatively
and nothing of embedctl. All else runs in the parent.
"""
