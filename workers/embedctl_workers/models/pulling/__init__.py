"""Downloads a model from the hub into the hub's own cache: only when told, only what is needed, and every byte checked.

The hub's client removes what it has of a file when a download breaks, and does not compare contents with their hashes.
So files are downloaded here, with the client's addresses, sessions, tokens and errors, and take their names in the
cache once they are checked.
"""
