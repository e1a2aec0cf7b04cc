"""The libraries that encode, imported for all forks of one process: it takes 7 CPU s, so not each of them pays for it.

The process itself runs no operation: a fork has none of the threads with which OpenMP shares them, and would wait for
them forever.
"""

from __future__ import annotations

import importlib
import os
from contextlib import suppress

from embedctl_workers.machine.devices import SILENCE_VARIABLE, THREAD_VARIABLES

# NumPy and SciPy start threads as they load, unless there is to be one. torch and onnxruntime are told by their
# backends how many to use.
os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
os.environ[SILENCE_VARIABLE] = "1"

for _name in (
    "sentence_transformers",
    "onnx",
    "onnxruntime",
    "transformers.models.bert.modeling_bert",
    "embedctl_workers.backends.onnx.backend",
    "embedctl_workers.backends.torch.backend",
    "embedctl_workers.commands.model",
    "embedctl_workers.measuring.verification",
    "embedctl_workers.models.builders",
    "tests.support.references_here",
):
    with suppress(ImportError):  # what lacks a package is tested without a model
        importlib.import_module(_name)
