"""The files of a model on disk, and what is built from them: cache, artefacts, references, tuning."""
