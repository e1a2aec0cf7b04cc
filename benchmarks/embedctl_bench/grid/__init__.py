"""`embedctl bench grid`: cores × copies of the model × lengths × batches."""
