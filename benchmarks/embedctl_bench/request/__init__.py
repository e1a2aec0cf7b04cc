"""`embedctl bench request`: requests of long texts through the whole product."""
