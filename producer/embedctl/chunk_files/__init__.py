"""The bytes of chunks: in Redis, or outside of it, in a folder that all machines share or in a bucket."""

from embedctl.chunk_files.chunks import ChunkFiles, Upload, Where

__all__ = ["ChunkFiles", "Upload", "Where"]
