"""`embedctl_workers.building.tensorrt` as a process, on stand-ins for TensorRT 10.16 and a GPU."""

from __future__ import annotations

from embedctl_workers.backends.tensorrt import runtime
from embedctl_workers.building import tensorrt as build
from tests.support.fakes import tensorrt
from tests.support.fakes.cuda import FakeDevice


def open_runtime() -> runtime.Runtime:
    device = FakeDevice()
    trt = tensorrt.load("10.16", device)
    return runtime.Runtime(trt, device, runtime.make_log(trt))


if __name__ == "__main__":
    runtime.open_runtime = open_runtime
    build.main()
