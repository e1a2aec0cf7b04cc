"""Tokens, batches and vectors: NumPy arrays in, NumPy arrays out."""
