"""Measuring a loaded model on its device: how fast it encodes and tokenises."""
