"""`embedctl bench engines`: engines side by side on texts of mixed and of long lengths."""
