"""`embedctl bench grid`: cores × lengths × batches."""
