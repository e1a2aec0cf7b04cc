"""`embedctl bench study`: what ONNX, int8 and batching bring over torch."""
