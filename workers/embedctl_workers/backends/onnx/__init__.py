"""Models as ONNX graphs, exported from sentence-transformers and run by onnxruntime."""
