"""Models as ONNX graphs: how they are built. What runs them is `embedctl_workers.backends.onnx.backend`."""
