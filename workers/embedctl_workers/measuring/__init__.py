"""Measuring a loaded model on its device: rates, operations, and what share of the device they are."""
