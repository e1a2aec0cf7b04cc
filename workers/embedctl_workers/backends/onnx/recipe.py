"""The artefact that a machine runs: its recipe, and how it is found or built."""

from __future__ import annotations

import platform
from functools import partial
from importlib import metadata
from importlib.util import find_spec

from embedctl_config.cpu import cpu_flags
from embedctl_config.errors import MissingExtra, SettingsError
from embedctl_config.outputs import PLAIN
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import Artifact, Wanted
from embedctl_workers.models.build_process import found_or_built, require
from embedctl_workers.models.builders import USUAL, BuildOptions
from embedctl_workers.models.files import ModelFiles

#: The kinds of artefact. The backends that run them have the same names.
ONNX, ONNX_INT8 = "onnx", "onnx-int8"
KINDS = (ONNX, ONNX_INT8)
#: The exporters that make graphs of models.
OWN, OPTIMUM = "own", "optimum"
EXPORTERS = (OWN, OPTIMUM)
#: Instructions that add products of bytes directly into 32 bits. Without them, pairs are added into 16 bits, which can
#: overflow.
_BYTE_PRODUCTS = {"avx512_vnni", "avx_vnni", "amx_int8"}


def wanted(files: ModelFiles, kind: str, exporter: str = OWN) -> Wanted:
    """The artefact that this machine runs; MissingExtra if onnxruntime is not installed."""
    recipe = {"kind": kind, "exporter": exporter, "onnxruntime": onnxruntime_version(f"backend {kind!r}")}
    if kind == ONNX_INT8:
        recipe["weights"] = "7 bits" if reduced_range() else "8 bits"
    if files.outputs != PLAIN:
        recipe["outputs"] = ", ".join(files.outputs)
    return Wanted(files.fingerprint, recipe)


def onnxruntime_version(needed_for: str) -> str:
    """The version of onnxruntime here, with or without its providers for GPUs; MissingExtra if it is not installed."""
    for package in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    raise MissingExtra("onnx", needed_for)


def _build_kind(kind: str, files: ModelFiles, host: Host, how: BuildOptions) -> Artifact:
    if how.target:
        raise SettingsError(f"backend {kind!r} runs on the machine at hand: leave --target {how.target} out")
    return artifact_for(files, kind, host, how)


build_onnx = partial(_build_kind, ONNX)
build_onnx_int8 = partial(_build_kind, ONNX_INT8)


def artifact_for(files: ModelFiles, kind: str, host: Host, how: BuildOptions = USUAL) -> Artifact:
    """An artefact of one of :data:`KINDS`, as :func:`found_or_built`; of `how`, the exporter counts too."""
    want, ready = wanted(files, kind, how.exporter), partial(_check_extras, how.exporter)
    return found_or_built(files, want, host, how, ready, exporter=how.exporter)


def reduced_range() -> bool:
    """Whether int8 weights must leave one bit unused, so that sums of products stay exact on this CPU."""
    return platform.machine() in ("x86_64", "AMD64") and not _BYTE_PRODUCTS & cpu_flags()


def _check_extras(exporter: str) -> None:
    if exporter == OPTIMUM and find_spec("optimum") is None:
        raise MissingExtra(
            OPTIMUM, "the exporter optimum, in a separate environment (it needs transformers below 4.58),"
        )
    require("torch", "torch", "sentence_transformers")
    require("onnx", "onnx")
