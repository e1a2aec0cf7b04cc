"""onnxruntime's execution providers: the CPU, CUDA, or TensorRT. A session that runs another one is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

from embedctl_config.errors import DeviceLost, ModelError, SettingsError, WorkerError
from embedctl_workers.backends.base import is_out_of_memory
from embedctl_workers.models.cache import private_folder

log = logging.getLogger(__name__)

CPU, CUDA, TENSORRT = "cpu", "cuda", "tensorrt"
#: The option's value → onnxruntime's name.
NAMES: Mapping[str, str] = {
    CPU: "CPUExecutionProvider",
    CUDA: "CUDAExecutionProvider",
    TENSORRT: "TensorrtExecutionProvider",
}
#: Most rows of a batch that TensorRT's engine is built for: a larger batch would rebuild the engine.
MOST_ROWS = 64
_ERRORS_ONLY = 3
_CPU_ONLY = (NAMES[CPU],)


@dataclass(frozen=True, slots=True)
class ProviderOptions:
    """The options of a hardware class whose backend is `onnx`.

    Attributes:
        provider: `cpu`, `cuda` or `tensorrt`.
        fp16: whether TensorRT may compute in 16 bits; layer normalisation stays in 32.
    """

    provider: str = CPU
    fp16: bool = False

    def __post_init__(self) -> None:
        if self.provider not in NAMES:
            raise SettingsError(f"provider {self.provider!r} of backend onnx is none of {', '.join(NAMES)}")
        if not isinstance(self.fp16, bool):
            raise SettingsError(f"fp16 {self.fp16!r} of backend onnx is neither true nor false")
        if self.fp16 and self.provider != TENSORRT:
            raise SettingsError(f"fp16 of backend onnx is for provider tensorrt, not {self.provider}")


ON_CPU = ProviderOptions()


def providers_for(
    options: ProviderOptions, *, inputs: Sequence[str], max_tokens: int, cache: Path, prefix: str
) -> Sequence[Any]:
    """The providers of a session: onnxruntime's names, in order of preference, with options.

    Args:
        inputs: the names of the graph's inputs, each rows × tokens.
        cache: the folder that keeps what was built for this machine.
        prefix: the prefix of TensorRT's file names, unique to the graph.

    Raises:
        ModelError: others may write to the folder of TensorRT's files.
    """
    # TF32 rounds to 10 bits of mantissa, which breaks the promise of fp32.
    cuda = (NAMES[CUDA], {"device_id": "0", "use_tf32": "0"})
    match options.provider:
        case "cuda":
            return (cuda, *_CPU_ONLY)
        case "tensorrt":
            return ((NAMES[TENSORRT], _tensorrt(options, inputs, max_tokens, cache, prefix)), cuda, *_CPU_ONLY)
        case _:
            return _CPU_ONLY


def _tensorrt(
    options: ProviderOptions, inputs: Sequence[str], max_tokens: int, cache: Path, prefix: str
) -> dict[str, str]:
    folder = private_folder(cache / "onnxruntime-tensorrt")

    def shapes(rows: int, tokens: int) -> str:
        return ",".join(f"{name}:{rows}x{tokens}" for name in inputs)

    return {
        "device_id": "0",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(folder),
        "trt_engine_cache_prefix": prefix,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(folder),
        "trt_profile_min_shapes": shapes(1, 1),
        "trt_profile_opt_shapes": shapes(MOST_ROWS, min(128, max_tokens)),
        "trt_profile_max_shapes": shapes(MOST_ROWS, max_tokens),
        "trt_fp16_enable": str(int(options.fp16)),
        "trt_layer_norm_fp32_fallback": str(int(options.fp16)),
    }


def open_session(
    graph: Path, threads: int, *, optimized: Path | None = None, providers: Sequence[Any] = _CPU_ONLY
) -> onnxruntime.InferenceSession:
    """Load a graph.

    Args:
        threads: compute threads of the session. onnxruntime's own choice would ignore the process's affinity.
        optimized: where to write the graph as it is executed.
        providers: from :func:`providers_for`. The first one must execute the graph.

    Raises:
        ModelError: the graph can't be loaded.
        WorkerError: the first provider is not available.
    """
    wanted = providers[0] if isinstance(providers[0], str) else providers[0][0]
    _check_available(wanted)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # The session's threads would spin between two operators, on CPUs that the tokeniser of the next chunk needs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Memory plans for the shape of one batch are useless for the next.
    options.enable_mem_pattern = False
    options.log_severity_level = _ERRORS_ONLY
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
        # The weights go to a separate file, because a graph's file may not exceed 2 GiB.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
    try:
        session = onnxruntime.InferenceSession(str(graph), options, providers=list(providers))
    except Exception as error:  # onnxruntime's errors have no narrower base class
        raise ModelError(f"onnxruntime {onnxruntime.__version__} can't load {graph}: {error}") from error
    running = session.get_providers()
    if running[0] != wanted:
        raise WorkerError(
            f"onnxruntime was asked for {wanted} and runs {running[0]}: the libraries of CUDA"
            f"{' or TensorRT' if wanted == NAMES[TENSORRT] else ''} that it needs can't be loaded (docs/tensorrt.md "
            "lists them)"
        )
    return session


def _check_available(wanted: str) -> None:
    if wanted == NAMES[CPU]:
        return
    if wanted not in onnxruntime.get_available_providers():
        raise WorkerError(
            f"onnxruntime {onnxruntime.__version__} has no {wanted}: pip uninstall onnxruntime, then pip install "
            "onnxruntime-gpu"
        )
    # CUDA's libraries come in separate packages, and the loader does not find them there.
    onnxruntime.preload_dlls()


def raise_if_lost(error: Exception, provider: str) -> None:
    """Raise DeviceLost if an error of a session's run means that the GPU is lost.

    Raises:
        DeviceLost: after this error of CUDA, the process can no longer use the device.
    """
    lost = "CUDA failure" in str(error) and "out of memory" not in str(error) and not is_out_of_memory(error)
    if provider != CPU and lost:
        raise DeviceLost(f"the GPU is lost to this process: {str(error).partition(chr(10))[0][:300]}") from error
