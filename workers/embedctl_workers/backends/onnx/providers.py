"""onnxruntime's execution providers: the CPU and CUDA. A session that runs another one is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import onnxruntime

from embedctl_config.errors import DeviceLost, ModelError, SettingsError, WorkerError
from embedctl_workers.backends.base import is_out_of_memory

log = logging.getLogger(__name__)

CPU, CUDA = "cpu", "cuda"
#: The option's value → what a session is asked for, in order of preference. TF32 rounds to 10 bits of mantissa, which
#: breaks the promise of fp32.
_ASKED: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    CPU: {"CPUExecutionProvider": {}},
    CUDA: {"CUDAExecutionProvider": {"device_id": "0", "use_tf32": "0"}, "CPUExecutionProvider": {}},
}
_ERRORS_ONLY = 3


def check_provider(provider: object) -> str:
    """The option `provider` of a hardware class whose backend is `onnx`; a SettingsError if there is no such one."""
    if provider not in (CPU, CUDA):
        raise SettingsError(f"provider {provider!r} of backend onnx is none of {CPU}, {CUDA}")
    return str(provider)


def open_session(graph: Path, threads: int, *, provider: str = CPU) -> onnxruntime.InferenceSession:
    """Load a graph.

    Args:
        threads: compute threads of the session. onnxruntime's own choice would ignore the process's affinity.
        provider: what must execute the graph.

    Raises:
        ModelError: the graph can't be loaded.
        WorkerError: the provider is not available.
    """
    wanted = next(iter(_ASKED[provider]))
    if provider != CPU:
        _check_available(wanted)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # The session's threads would spin between two operators, on CPUs that the tokeniser of the next chunk needs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Memory plans for the shape of one batch are useless for the next.
    options.enable_mem_pattern = False
    options.log_severity_level = _ERRORS_ONLY
    try:
        session = onnxruntime.InferenceSession(str(graph), options, providers=list(_ASKED[provider].items()))
    except Exception as error:  # onnxruntime's errors have no narrower base class
        raise ModelError(f"onnxruntime {onnxruntime.__version__} can't load {graph}: {error}") from error
    running = session.get_providers()
    if running[0] != wanted:
        raise WorkerError(
            f"onnxruntime was asked for {wanted} and runs {running[0]}: the libraries of CUDA that it needs can't be "
            "loaded"
        )
    return session


def _check_available(wanted: str) -> None:
    if wanted not in onnxruntime.get_available_providers():
        raise WorkerError(
            f"onnxruntime {onnxruntime.__version__} has no {wanted}: pip uninstall onnxruntime, then pip install "
            "onnxruntime-gpu"
        )
    # CUDA's libraries come in separate packages, and the loader does not find them there.
    onnxruntime.preload_dlls()


def raise_if_lost(error: Exception, provider: str) -> None:
    """Raise DeviceLost if, after this error of a session's run, the process can no longer use the GPU."""
    lost = "CUDA failure" in str(error) and "out of memory" not in str(error) and not is_out_of_memory(error)
    if provider != CPU and lost:
        raise DeviceLost(f"the GPU is lost to this process: {str(error).partition(chr(10))[0][:300]}") from error
