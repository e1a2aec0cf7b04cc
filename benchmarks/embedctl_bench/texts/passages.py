"""Passages of real English: the paragraphs of Python's own docstrings. It needs the standard library alone.

It parses source files of the standard library and of some installed packages, and never imports them.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
PACKAGES = Path(sysconfig.get_path("purelib"))
#: Installed packages to read, and folders to skip because their docstrings explain nothing.
DOCUMENTED = ("celery", "click", "kombu", "redis", "rich")
SKIPPED = {"__pycache__", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo", "_vendor"}

#: Words that are common in English prose, and rare in code and tables.
COMMON = re.compile(
    r"\b(a|all|an|and|are|as|at|be|but|by|can|for|from|has|if|in|into|is|it|its|no|not|of|on|or|that|the|then|there|"
    r"these|this|to|used|was|when|where|which|will|with|would|you|your)\b",
    re.IGNORECASE,
)
LEAST_WORDS = 6
SENTENCE = re.compile(r"[\"'`*(]{0,2}[A-Z].*[.!?:][\"'`)]{0,2}", re.DOTALL)
NOT_PROSE = re.compile(r">>>|\.\. |[=*_~^-]{4}|[|+]--|\w+ : |^\s*[-*:@|#]|^\w+\(|https?:|[<>]=|[{}\[\]]", re.MULTILINE)


def passages() -> Iterator[tuple[str, str]]:
    """Yield ids and texts, in the same order every time and without exact duplicates."""
    seen: set[str] = set()
    every = (found for path, module in _sources() for found in docstrings(path, module))
    for name, docstring in every:
        for number, text in enumerate(paragraphs(docstring), start=1):
            if is_prose(text) and text not in seen:
                seen.add(text)
                yield f"{name}#{number}", text


def spread_passages(count: int) -> list[tuple[str, str]]:
    """So many of the passages, spread evenly over all of them; all if there are not so many."""
    found = list(passages())
    count = min(count, len(found))
    return [found[number * len(found) // count] for number in range(count)]


def _sources() -> Iterator[tuple[Path, str]]:
    """The files to read, and the names of their modules."""
    for root, base in [(STANDARD_LIBRARY, STANDARD_LIBRARY), *((PACKAGES / name, PACKAGES) for name in DOCUMENTED)]:
        for path in sorted(_below(root)):
            yield path, module_name(path.relative_to(base))


def _below(root: Path) -> Iterator[Path]:
    """The source files in a folder, without a look into those that are skipped: they hold most of a library."""
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def module_name(path: Path) -> str:
    """The dotted name of a source file: `asyncio.queues` for `asyncio/queues.py`."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def docstrings(path: Path, module: str) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a source file, each with the dotted name of the object that it documents."""
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in other people's code
            tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return
    yield from _docstrings_below(tree, module)


def _docstrings_below(node: ast.Module | ast.ClassDef | ast.stmt, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if docstring := ast.get_docstring(node, clean=False):
            yield name, inspect.cleandoc(docstring)
        for inner in node.body:
            if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _docstrings_below(inner, f"{name}.{inner.name}")


def paragraphs(docstring: str) -> Iterator[str]:
    """Yield the blocks between empty lines, each joined to one line; '' for a block that is not prose."""
    for block in re.split(r"\n\s*\n", docstring):
        lines = block.splitlines()
        # Lines with different indents are a list or code, and make no sense on one line.
        indents = {len(line) - len(line.lstrip()) for line in lines}
        yield " ".join(block.split()) if len(indents) == 1 and not NOT_PROSE.search(block) else ""


def is_prose(text: str) -> bool:
    """Whether a paragraph consists of English sentences."""
    words = text.split()
    letters = sum(character.isalpha() or character == " " for character in text)
    return (
        len(words) >= LEAST_WORDS
        and SENTENCE.fullmatch(text) is not None
        and letters >= 0.85 * len(text)
        and len(COMMON.findall(text)) >= 0.2 * len(words)
    )
