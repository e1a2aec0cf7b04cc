"""Where vectors come to rest: one loop, one interface, and a module for each destination."""
