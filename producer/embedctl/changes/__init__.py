"""Only what changed: vectors that an earlier output or a cache has are copied, and the rest is encoded."""
