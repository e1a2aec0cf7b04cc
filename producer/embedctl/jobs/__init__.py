"""The library: makes jobs, waits for them and gives their vectors. The commands and the gateway use it too."""
