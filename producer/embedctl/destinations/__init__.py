"""Where vectors come to rest: one loop, one interface, a module for each destination. None knows another."""
