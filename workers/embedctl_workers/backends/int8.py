"""int8 on CPUs: the packed engine where it can compute in int8, else onnxruntime."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from embedctl_config.cpu import cpu_flags
from embedctl_config.errors import MissingExtra
from embedctl_workers.machine import teams
from embedctl_workers.models.builders import BuildOptions
from embedctl_workers.models.compiling import NOT_COMPILED
from embedctl_workers.models.files import ModelFiles

if TYPE_CHECKING:
    from embedctl_config.hardware import ModelEntry
    from embedctl_workers.backends.base import Backend
    from embedctl_workers.machine.host import Host
    from embedctl_workers.models.artifacts import Artifact

log = logging.getLogger(__name__)

#: Instructions for products of bytes: the packed engine has code for these.
_BYTE_PRODUCTS = {"avx512_vnni", "avx_vnni", "avx2"}


class Int8Backend:
    """Chooses between the two backends that compute in int8 on a CPU.

    The packed engine is faster and more accurate. It needs a CPU with AVX2, PyTorch, a C compiler and a model of the
    BERT family. Where one is missing, onnxruntime runs the model's graph, and one line of the log says what is missing.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, host: Host, options: Mapping[str, Any]) -> Backend:
        missing = "this CPU has no AVX2"
        if _BYTE_PRODUCTS & cpu_flags():
            try:
                teams.bind(host.places)
                from embedctl_workers.backends.torch.int8 import NotInt8, TorchInt8Backend
            except ModuleNotFoundError as error:
                missing = f"{error.name} is not installed"
            else:
                try:
                    return TorchInt8Backend.load(model, entry, host, options)
                except NotInt8 as error:
                    missing = str(error)
        log.info("int8 runs on onnxruntime, not in the packed engine: %s", missing)
        try:
            from embedctl_workers.backends.onnx.backend import OnnxInt8Backend
        except ModuleNotFoundError as error:
            raise MissingExtra("onnx", f"class with backend 'int8' ({missing})") from error
        return OnnxInt8Backend.load(model, entry, host, options)


def build(files: ModelFiles, host: Host, how: BuildOptions) -> Artifact:
    """As :data:`embedctl_workers.models.builders.Builder`: the graph for onnxruntime, and the packed engine's code."""
    from embedctl_workers.backends.onnx.recipe import build_onnx_int8

    if _BYTE_PRODUCTS & cpu_flags():
        try:
            from embedctl_workers.backends.torch.int8 import compile_all

            compile_all(host)
        except (*NOT_COMPILED, ModuleNotFoundError) as error:
            log.info("the packed engine can't be compiled: %s", error)
    return build_onnx_int8(files, host, how)
