"""The benchmark in infinity's documentation (version 0.0.25): figures of other hardware."""

from __future__ import annotations

from dataclasses import dataclass

_CPU, _L4 = "GCP g2-standard-16, Intel Cascade Lake", "NVIDIA L4"
_SMALL, _LARGE = "bge-small-en-v1.5", "bge-large-en-v1.5"


@dataclass(frozen=True, slots=True)
class Published:
    """A row; `seconds` are for 10 requests, and `remark` is the publisher's own."""

    system: str
    model: str
    hardware: str
    requests_per_s: float
    seconds: float
    remark: str = ""


ROWS = (
    Published("infinity, optimum int8", _SMALL, _CPU, 0.10, 100.490),
    Published("infinity, optimum onnx", _SMALL, _CPU, 0.08, 125.342),
    Published("fastembed, onnx", _SMALL, _CPU, 0.08, 125.770),
    Published("sentence-transformers, torch", _SMALL, _CPU, 0.04, 256.884),
    Published("infinity, torch", _SMALL, _CPU, 0.03, 353.065, "marked there as needing revision"),
    Published("text-embeddings-inference, candle", _SMALL, _CPU, 0.009, 1104.357),
    Published("text-embeddings-inference, candle, flashbert", _LARGE, _L4, 0.54, 18.491),
    Published("infinity, torch + compile + fa2", _LARGE, _L4, 0.51, 19.562),
    Published("tensorrt, via infinity", _LARGE, _L4, 0.43, 23.367),
    Published("infinity, onnx-gpu fp16", _LARGE, _L4, 0.41, 24.448),
    Published("sentence-transformers, fp16", _LARGE, _L4, 0.17, 59.107),
    Published("infinity, torch", _LARGE, "AMD MI210, 16-core CPU", 0.75, 13.400),
    Published("infinity, neuron fp16", _LARGE, "AWS inf2.xlarge, one of its two cores", 0.11, 90.564),
)

#: The fastest CPU rate of each precision, as a multiple of sentence-transformers' on torch.
OVER_SENTENCE_TRANSFORMERS = {"int8": 0.10 / 0.04, "fp32": 0.08 / 0.04}
#: The error that it states for every system, and that its benchmark does not check.
ACCURACY = 1e-4
