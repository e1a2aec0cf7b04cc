"""Models on a GPU, by torch: CUDA, and ROCm through the same interface."""
