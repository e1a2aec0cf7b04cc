"""The processes that fill an artefact: one module for each runtime."""
