"""`embedctl bench request`: requests through the whole product, or over HTTP."""
