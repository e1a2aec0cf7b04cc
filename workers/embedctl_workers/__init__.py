"""What runs beside a device: claim a chunk, tokenise it, encode it, store its vectors.

Importing this package imports nothing heavy: a worker must be pinned before torch is.
"""
