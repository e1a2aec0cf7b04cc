"""Where the bytes of chunks are: in Redis, or outside of it, in a folder that all machines share or in a bucket."""

from embedctl.data.planes import DataPlane, Entry, InRedis, Upload, Where, plane_of

__all__ = ["DataPlane", "Entry", "InRedis", "Upload", "Where", "plane_of"]
