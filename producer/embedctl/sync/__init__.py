"""`--sync`: compares a corpus with a destination, so that only what differs is encoded."""
