"""Convert a model to OpenVINO, fp32."""

from __future__ import annotations

import sys

from sentence_transformers import SentenceTransformer


def main() -> None:
    """Write the graph beside the model's own files."""
    source, target = sys.argv[1:]
    model = SentenceTransformer(source, device="cpu", backend="openvino", model_kwargs={"export": True})
    model.save_pretrained(target)


if __name__ == "__main__":
    main()
