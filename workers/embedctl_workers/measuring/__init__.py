"""Measuring a loaded model on its device: its rates, its operations, and its share of the device's matrix rate."""
