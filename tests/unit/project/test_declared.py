"""Each import of the source is declared in pyproject.toml, for the role that runs it.

What another package brings by chance does not count, because that may stop. A test can't see what a package imports and
does not declare itself: `make roles` can.
"""

from __future__ import annotations

import ast
import functools
import itertools
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeGuard

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from embedctl_bench.peers.environments import ALONE

ROOT = Path(__file__).parents[3]
FOLDERS = {
    "embedctl_config": "config",
    "embedctl": "producer",
    "embedctl_gateway": "gateway",
    "embedctl_workers": "workers",
    "embedctl_bench": "benchmarks",
}
_BUILD = "torch,onnx"
#: Module or package → the extras that each of its roles has; what several roles share is declared for each of them. The
#: longest name counts, and whatever has none is of the bare role. An import within `try` belongs to the extra that the
#: `MissingExtra` of its `except` names.
ROLES: Mapping[str, tuple[str, ...]] = {
    "embedctl.operating.dashboard": ("flower",),
    "embedctl.operating.monitoring.metrics": ("metrics",),
    "embedctl.destinations.postgresql_errors": ("pgvector",),
    "embedctl.destinations.postgresql_table": ("pgvector",),
    "embedctl.destinations.vector_columns": ("parquet",),
    "embedctl_gateway": ("gateway",),
    "embedctl_workers.arrays": ("torch", "onnx", "neuron"),
    "embedctl_workers.backends.gpu": ("gpu",),
    "embedctl_workers.backends.neuron": ("neuron",),
    "embedctl_workers.backends.onnx": ("onnx", "optimum"),
    "embedctl_workers.backends.onnx.export": (_BUILD, "optimum"),
    "embedctl_workers.backends.tensorrt": ("tensorrt",),
    "embedctl_workers.backends.torch": ("torch", "neuron", "optimum"),
    "embedctl_workers.commands.split": ("torch", "onnx"),
    "embedctl_workers.machine.nvidia": ("gpu",),
    "embedctl_workers.models": ("torch", "onnx", "neuron", "optimum"),
    "embedctl_workers.models.opening": ("torch", "neuron", "optimum"),
    "embedctl_workers.models.references": ("torch", "neuron", "optimum"),
    "embedctl_workers.serving.metrics": ("metrics",),
    "embedctl_bench": ("bench",),
}
#: Module and import → the extra that is looked for before it is imported.
LOOKED_FOR = {
    ("embedctl_workers.backends.onnx.export", "optimum"): "optimum",
    ("embedctl.testing", "pytest"): "dev",
    ("embedctl_workers.machine.teams", "torch"): "torch",
}
#: Other systems run in environments of their own, made from the requirements in this folder.
ADAPTERS, THEIRS = "embedctl_bench.peers.adapters", ROOT / "benchmarks" / "embedctl_bench" / "peers"


class Declared:
    """The distributions that a project's extras name, by their canonical names."""

    def __init__(self, project: Mapping[str, Any]) -> None:
        lists: dict[str, list[str]] = {"": project["dependencies"], **project["optional-dependencies"]}
        self._lists = {extra: [Requirement(each) for each in named] for extra, named in lists.items()}

    def of(self, extras: str) -> set[str]:
        """What these extras, separated by commas, and the bare role declare, those that they include too."""
        found = set()
        for extra in {"", *extras.split(",")}:
            for requirement in self._lists[extra]:
                if requirement.name == "embedctl":
                    found |= self.of(",".join(requirement.extras))
                else:
                    found.add(canonicalize_name(requirement.name))
        return found


def imports(tree: ast.AST, extra: str = "") -> Iterator[tuple[str, str]]:
    """The names of the top packages that are imported anywhere, each with the extra that its `try` names, if any.

    What is imported only for types is left out.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr_context | ast.operator | ast.Constant | ast.Name):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Try):
            within = ast.Module(node.body, [])
            yield from imports(within, _named(node) or extra)
            rest: list[ast.stmt] = [*node.orelse, *node.finalbody, *(each for on in node.handlers for each in on.body)]
            yield from imports(ast.Module(rest, []), extra)
            continue
        yield from ((name, extra) for name in _imported(node))
        yield from imports(node, extra)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [str(node.module).partition(".")[0]]
    if _calls(node, "import_module") and isinstance(name := node.args[0], ast.Constant):
        return [str(name.value).partition(".")[0]]
    return []


def _named(node: ast.Try) -> str:
    """The extra that a `MissingExtra` in an `except` names."""
    for each in (each for handler in node.handlers for each in ast.walk(handler)):
        if _calls(each, "MissingExtra") and isinstance(extra := each.args[0], ast.Constant):
            return str(extra.value)
    return ""


def _calls(node: ast.AST, function: str) -> TypeGuard[ast.Call]:
    """Whether a node calls a function of this name with an argument."""
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function and bool(node.args)
    )


def undeclared(module: str, source: str, declared: Declared) -> list[str]:
    """What a module imports without a declaration, in words."""
    fits = [name for name in ROLES if f"{module}.".startswith(f"{name}.")]
    roles = ROLES[max(fits, key=len)] if fits else ("",)
    theirs = of_adapters() if module.startswith(ADAPTERS) else set()
    wrong = []
    for name, own in imports(ast.parse(source)):
        if name in sys.stdlib_module_names or name in FOLDERS or name == "__future__":
            continue
        own = own or LOOKED_FOR.get((module, name), "")
        wrong += [
            f"{module} imports {name}, which {extras or 'the bare role'} does not declare"
            for extras in ([own] if own else roles)
            if not distributions(name) & (declared.of(extras) | theirs)
        ]
    return wrong


def distributions(name: str) -> set[str]:
    """The distributions that have a package; where it is not installed, the one of its own name."""
    return {canonicalize_name(each) for each in _distributions().get(name, [name])}


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


@functools.cache
def of_adapters() -> set[str]:
    lines = [line for file in THEIRS.glob("*.txt") for line in file.read_text(encoding="utf-8").splitlines()]
    lines += itertools.chain.from_iterable(ALONE.values())
    return {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith(("#", "-"))}


def _project() -> Declared:
    return Declared(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def test_every_import_is_declared_for_its_role() -> None:
    declared, wrong = _project(), []
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder / package).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts).removesuffix(".__init__")
            wrong += undeclared(module, path.read_text(encoding="utf-8"), declared)
    assert wrong == []
