"""The bytes of chunks outside of Redis: in a shared folder or in a bucket. Redis then holds references."""

from embedctl.chunk_files.chunks import ChunkFiles, Upload, Where

__all__ = ["ChunkFiles", "Upload", "Where"]
