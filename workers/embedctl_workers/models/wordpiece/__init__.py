"""A compiled tokenizer for models of the BERT family, with exactly the tokens of the library `tokenizers`."""
