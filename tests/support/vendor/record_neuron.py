"""Record what `torch_neuronx` offers: `python tests/support/vendor/record_neuron.py`, where AWS' package is installed.

Writes torch_neuronx.json anew. The compiler's options stay as they are: its help does not list their
values in a form that could be read.
"""

from __future__ import annotations

import inspect
import json
from importlib import metadata
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("torch_neuronx.json")


def main() -> None:
    import torch_neuronx  # type: ignore[import-not-found]  # it is there where this runs

    before = json.loads(FILE.read_text(encoding="utf-8"))
    version = metadata.version("torch-neuronx")
    recorded = {
        "package": "torch-neuronx",
        "version": version,
        "known_by": f"Recorded from the installed wheel {version}; the compiler's options from documentation.",
        "sources": before["sources"],
        "functions": {name: parameters_of(getattr(torch_neuronx, name)) for name in before["functions"]},
        "compiler": before["compiler"],
    }
    FILE.write_text(json.dumps(recorded, indent=2) + "\n", encoding="utf-8")


def parameters_of(function: Any) -> list[dict[str, Any]]:
    """A function's parameters, with the defaults that JSON has; others by what they look like."""
    return [
        {"name": each.name, "kind": each.kind.name, **({} if each.default is each.empty else {"default": plain(each)})}
        for each in inspect.signature(function).parameters.values()
    ]


def plain(parameter: inspect.Parameter) -> object:
    """A default as JSON has it."""
    try:
        return json.loads(json.dumps(parameter.default))
    except TypeError:
        return repr(parameter.default)


if __name__ == "__main__":
    main()
