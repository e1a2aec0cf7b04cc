"""`embedctl bench matrix`: batch × sequence × processes × requests."""
