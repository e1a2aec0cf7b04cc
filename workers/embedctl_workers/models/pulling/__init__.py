"""Downloads a model from the hub into the hub's own cache: only when told, only what is needed, and every byte checked.

The hub's client begins a file again after a download that gave up or was killed, compares no contents with their hash,
and notes a branch before its files are there (docs/design.md). So files are downloaded here, with the client's
addresses, sessions, tokens and errors, and take their names in the cache once they are checked.
"""
