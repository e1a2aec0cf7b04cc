"""Other systems, each run in an environment where embedctl is not installed.

Modules import each other relatively. Only the adapters of our own systems, of limits and of servers (`embedctl`,
`embedctl_pipeline`, `floor`, `products`, `http_direct`) import embedctl; they run in the environment of embedctl.
"""
