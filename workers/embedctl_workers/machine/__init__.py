"""The machine that this process runs on: its CPUs and devices, their limits, and pinning to them."""
