"""What runs beside a device. Importing it imports nothing heavy: a worker must be pinned before torch is imported."""
