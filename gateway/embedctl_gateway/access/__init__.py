"""Who may call, and how much at once."""
