"""Models as TensorRT plans; not verified on hardware. `import tensorrt` in here means the vendor's package."""
