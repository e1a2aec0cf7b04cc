"""The command lines of this package. They parse, pin the process, and only then import anything that starts threads."""
