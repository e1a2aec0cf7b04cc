"""The accuracy gate: are a backend's vectors those of the model?"""
