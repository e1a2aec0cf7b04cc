"""Encoders of the BERT family on packed tokens: all texts of a batch in one matrix, without padding."""
