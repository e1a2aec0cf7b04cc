"""Other systems, measured side by side with ours by `embedctl bench`: their environments, models and processes."""
