"""`python record_tensorrt.py WHEEL OUTPUT.json`: which names and signatures the vendor's package has.

WHEEL is one of `tensorrt_cu13_bindings` for the Python that runs this. Nothing is installed, and no GPU or driver is
needed. The names are those of the real extension module, and the signatures those that its functions' docstrings begin
with; nothing of it is executed but its import.

The extension is linked against the vendor's libraries (libnvinfer, libnvonnxparser and others), which do not come with
the wheel. So each library that it names and this machine lacks is replaced by an empty one, and every function that the
extension wants of them by one that returns 0 (compiled with `cc`; `readelf` and `nm` are needed too). Importing it only
registers classes, and calls none of these in a way that matters to names and docstrings.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

#: What embedctl uses of the package. Those members of each are recorded that our sources name.
CLASSES = (
    "Builder",
    "BuilderFlag",
    "DataType",
    "ICudaEngine",
    "IBuilderConfig",
    "IExecutionContext",
    "IHostMemory",
    "ILogger",
    "INetworkDefinition",
    "IOptimizationProfile",
    "ITensor",
    "ITimingCache",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "AttentionNormalizationOp",
    "EngineInspector",
    "ExecutionContextAllocationStrategy",
    "IAttention",
    "LayerInformationFormat",
    "ParserError",
    "ProfilingVerbosity",
    "Runtime",
    "TensorIOMode",
)
ROOT = Path(__file__).parents[3]
#: Members that Python gives to every class.
_COMMON = set(dir(object)) | {"__module__", "__doc__", "__dict__", "__weakref__", "__pybind11_module_local"}
_KINDS = ("members", "methods", "properties")
_STUB = "void *{name}(void) {{ return 0; }}\n"


def main() -> None:
    wheel, output = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        extension = next(folder.glob("*/tensorrt*.so"))
        module = load(extension, folder)
        record = {
            "wheel": wheel.name,
            "version": wheel.name.split("-")[1],
            "how": "by record_tensorrt.py, from the extension's classes and docstrings; not run on a GPU",
            "classes": {
                name: named(describe(getattr(module, name)), words()) for name in CLASSES if hasattr(module, name)
            },
        }
    output.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load(extension: Path, folder: Path) -> ModuleType:
    """The extension, with stubs for what is not here of the libraries that it is linked against."""
    here = [ctypes.CDLL(None), *(ctypes.CDLL(name) for name in ("libstdc++.so.6", "libgcc_s.so.1", "libm.so.6"))]
    wanted = [line.split()[-1].partition("@")[0] for line in output_of("nm", "-D", "--undefined-only", extension)]
    missing = [name for name in dict.fromkeys(wanted) if not any(has(library, name) for library in here)]
    source = folder / "stubs.c"
    source.write_text("".join(_STUB.format(name=name) for name in missing))
    for at, name in enumerate(needed(extension)):
        try:
            ctypes.CDLL(name)
        except OSError:
            stub = folder / name
            code = source if at == 0 or not any(folder.glob("lib*.so*")) else Path("/dev/null")
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-w", "-x", "c", str(code), "-o", str(stub), f"-Wl,-soname,{name}"],
                check=True,
            )
            ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)
    loader = importlib.machinery.ExtensionFileLoader("tensorrt", str(extension))
    spec = importlib.util.spec_from_file_location("tensorrt", extension, loader=loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def needed(library: Path) -> list[str]:
    found = (re.search(r"\(NEEDED\).*\[(.+)\]", line) for line in output_of("readelf", "-d", library))
    return [match[1] for match in found if match]


def output_of(*command: object) -> list[str]:
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line.strip()]


def has(library: Any, name: str) -> bool:
    try:
        library[name]
    except AttributeError:
        return False
    return True


def describe(cls: type) -> dict[str, Any]:
    """The members of a class: of an enumeration its values, else the signatures of methods, and the properties."""
    if hasattr(cls, "__members__"):
        return {"members": {name: int(value) for name, value in cls.__members__.items()}}
    methods: dict[str, list[str]] = {}
    properties: dict[str, dict[str, Any]] = {}
    nested: dict[str, Any] = {}
    for name in sorted(set(dir(cls)) - _COMMON | {"__init__"}):
        member = inspect.getattr_static(cls, name)
        if isinstance(member, property):
            properties[name] = {"settable": member.fset is not None}
        elif isinstance(member, type):
            nested[name] = describe(member)
        elif callable(getattr(cls, name)) and (found := signatures(name, getattr(cls, name).__doc__ or "")):
            methods[name] = found
    return {"methods": methods, "properties": properties, **({"classes": nested} if nested else {})}


def named(record: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """The record of a class with the members of these names alone. A member that is missing looks like one that the
    vendor does not have: a test that comes to it fails, until the package is recorded again."""
    kept = {kind: {name: of for name, of in record[kind].items() if name in known} for kind in _KINDS if kind in record}
    nested = {name: named(of, known) for name, of in record.get("classes", {}).items() if name in known}
    return {**kept, **({"classes": nested} if nested else {})}


def words() -> set[str]:
    """The words of our sources that speak of TensorRT."""
    sources = (path.read_text("utf-8") for folder in ("workers", "tests") for path in (ROOT / folder).rglob("*.py"))
    return {word for text in sources if "tensorrt" in text.lower() for word in re.findall(r"\w+", text)}


def signatures(name: str, text: str) -> list[str]:
    """The lines of a docstring of pybind11's that say what a function takes and gives; one an overload."""
    lines = (re.match(rf"\s*(?:\d+\. )?({re.escape(name)}\(.*\) -> .+)$", line) for line in text.splitlines())
    return list(dict.fromkeys(line[1] for line in lines if line and "*args, **kwargs" not in line[1]))


if __name__ == "__main__":
    main()
