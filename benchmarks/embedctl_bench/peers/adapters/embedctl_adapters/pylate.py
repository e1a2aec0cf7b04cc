"""PyLate, asked by lines of JSON: the CPU seconds, on one thread, of encoding documents with a model's folder."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from pylate import models

from .serving import serve


def main() -> None:
    """The arguments: the folder of a dense model, which gets a head of random weights, and the longest document."""
    torch.set_num_threads(1)
    model = models.ColBERT(sys.argv[1], device="cpu", embedding_size=128, document_length=int(sys.argv[2]))

    def cpu_s(request: dict[str, Any]) -> dict[str, float]:
        before = time.process_time()
        model.encode(request["texts"], batch_size=request["batch"], is_query=False, show_progress_bar=False)
        return {"cpu_s": time.process_time() - before}

    serve(cpu_s)


if __name__ == "__main__":
    main()
