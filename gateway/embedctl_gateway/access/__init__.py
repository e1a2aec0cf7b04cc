"""Who may call, and how much at once. Keys are kept as hashes."""
