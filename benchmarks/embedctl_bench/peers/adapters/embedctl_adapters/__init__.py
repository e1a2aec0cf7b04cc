"""Other systems, each run in an environment where embedctl is not installed.

Modules import each other relatively. Only the adapters of our own systems and of limits (`embedctl`,
`embedctl_pipeline`, `matrix`, `floor`) import embedctl; they run in the environment of embedctl.
"""
