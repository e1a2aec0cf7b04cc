"""Models as TensorRT plans: how they are built and run. Not verified on hardware.

`import tensorrt` in here means the vendor's package.
"""
