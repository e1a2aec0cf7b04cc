"""`embedctl bench`: the published benchmarks of the field, run on this machine and set beside the published figures."""
