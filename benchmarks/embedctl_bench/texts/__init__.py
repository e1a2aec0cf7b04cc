"""The texts that systems encode: passages of real English, and words of known lengths."""
