"""Convert a model to CTranslate2, fp32; it quantises as it loads."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from ctranslate2.converters import TransformersConverter


def main() -> None:
    """Write the weights, and the model's files that our wrapper reads."""
    source, target = map(Path, sys.argv[1:])
    TransformersConverter(str(source)).convert(str(target))
    for name in ("tokenizer.json", "sentence_bert_config.json"):
        shutil.copy(source / name, target)
    shutil.copytree(source / "1_Pooling", target / "1_Pooling")


if __name__ == "__main__":
    main()
