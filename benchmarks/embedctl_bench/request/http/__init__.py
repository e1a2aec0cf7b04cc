"""`embedctl bench request --http`: the gateway beside infinity's server, over HTTP."""
