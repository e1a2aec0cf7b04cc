"""The command lines of this package: they parse, pin the process, and only then import what starts threads."""
