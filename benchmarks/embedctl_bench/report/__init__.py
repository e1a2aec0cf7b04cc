"""Files of a report, each form in a module of its own."""
