"""Copy an installed model with its weights rounded to fp16: half the size, for a machine without network.

python -m benchmarks.ours.half_weights all-MiniLM-L6-v2 FOLDER
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from embedctl_config.errors import EmbedctlError
from embedctl_workers.models.files import resolve_model

#: Conversions to other formats, and the same weights once more.
_LEFT_OUT = ("onnx", "openvino", "*.onnx", "*.bin", "*.h5", "*.msgpack", "*.ot")


def main() -> None:
    """Run the command line."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        halve(resolve_model(sys.argv[1]).folder, Path(sys.argv[2]))
    except EmbedctlError as error:
        sys.exit(str(error))


def halve(source: Path, folder: Path) -> None:
    """Copy a model's folder with weights rounded to fp16. Loading it in fp32 gives the rounded values."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    for path in folder.rglob("*.safetensors"):
        weights = {name: each.half() if each.is_floating_point() else each for name, each in load_file(path).items()}
        path.unlink()  # the copy may be read-only, as its source
        save_file(weights, path, metadata={"format": "pt"})
        path.chmod(0o644)


if __name__ == "__main__":
    main()
