"""A compiled tokenizer for the models of the BERT family, whose tokens are exactly those of the library `tokenizers`."""
