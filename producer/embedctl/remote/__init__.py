"""Jobs that a gateway holds in place of Redis: the store's own steps, asked over HTTP."""
