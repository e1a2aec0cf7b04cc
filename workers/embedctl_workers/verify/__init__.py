"""`embedctl model verify`: the gate of a worker's start and a short benchmark, on this machine."""
