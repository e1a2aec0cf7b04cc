"""A chunk through the tokeniser, the batches and the backend."""
