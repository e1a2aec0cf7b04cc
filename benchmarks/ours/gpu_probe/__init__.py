"""What a GPU makes of the engine for packed tokens, part by part: `python -m benchmarks.ours.gpu_probe --help`."""
