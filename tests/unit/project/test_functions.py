"""A reader can hold each function in the head: its lines, its parameters, its levels; or a reason stands here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("config", "producer", "gateway", "workers", "benchmarks/embedctl_bench")
LINES, PARAMETERS, LEVELS = 40, 5, 3
#: Functions that are larger, and why each is best left so.
LEFT: dict[str, str] = {
    "benchmarks/embedctl_bench/peers/adapters/embedctl_adapters/embedctl.py:__init__": (
        "the protocol of adapters: each parameter is an option of the registry"
    ),
    "benchmarks/embedctl_bench/peers/adapters/embedctl_adapters/embedctl_pipeline.py:__init__": (
        "the protocol of adapters"
    ),
    "benchmarks/embedctl_bench/peers/adapters/embedctl_adapters/floor.py:__init__": "the protocol of adapters",
    "benchmarks/embedctl_bench/peers/adapters/embedctl_adapters/sentence_transformers.py:__init__": (
        "the protocol of adapters; the options are the library's"
    ),
    "config/embedctl_config/errors.py:__init__": "the facts of an error, each by its name",
    "config/embedctl_config/retry.py:call": (
        "what is asked, its errors, and optional bounds, and no caller gives more than three"
    ),
    "config/embedctl_config/settings.py:_setting": "the columns of a table: each setting is a row of it",
    "producer/embedctl/cli/job_command.py:of": "the values of click's options by name, and the settings",
    "producer/embedctl/cli/run.py:_stack": "used once: what one block of state, Redis and worker needs",
    "producer/embedctl/destinations/files.py:fetch": "a job, a path, who is told, and four choices with a default",
    "producer/embedctl/jobs/aio.py:aenqueue_embeddings": "public: the same call for asyncio",
    "producer/embedctl/jobs/enqueue.py:enqueue_embeddings": (
        "public: the texts, where their fields are, how long, and the options of a job"
    ),
    "producer/embedctl/jobs/enqueue.py:submit": "the same call for records and options that are made already",
    "producer/embedctl/jobs/job.py:deliver": "public: a destination, how it is stored, and three callbacks",
    "producer/embedctl/remote/jobs.py:add": "the arguments of a script",
    "producer/embedctl/remote/jobs.py:take": "the arguments of a script",
    "producer/embedctl/remote/jobs.py:note": "the arguments of a script",
    "producer/embedctl/store/drains.py:take": "the arguments of a script",
    "producer/embedctl/store/drains.py:note": "the arguments of a script",
    "producer/embedctl/store/jobs.py:add": "the arguments of a script",
    "producer/embedctl/store/jobs.py:_take_inline": "the arguments of three scripts",
    "producer/embedctl/store/jobs.py:release": "a lease of three, and the three things that may be told with it",
    "producer/embedctl/store/jobs.py:complete": "a lease of three, and a result of three",
    "producer/embedctl/store/stored_files.py:make": "the arguments of a script, which files and batches share",
    "workers/embedctl_workers/backends/dummy.py:__init__": "the options of a backend, which a class passes by name",
    "workers/embedctl_workers/commands/tune_search.py:search": "the options of a command, and who is told",
    "workers/embedctl_workers/models/pulling/pull.py:pull": "public: independent choices, three of them with a default",
    "workers/embedctl_workers/serving/metrics.py:__init__": "a flat list of metrics, one after the other",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = ast.If | ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Try | ast.Match


def functions() -> Iterator[tuple[str, Function]]:
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, Function):
                    yield f"{file.relative_to(ROOT)}:{node.name}", node


def lines(function: Function) -> int:
    """The lines of a function without its docstring."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def parameters(function: Function) -> int:
    """What a caller may give; the parameters of a command are its options, which `--help` lists."""
    decorated = " ".join(ast.unparse(each) for each in function.decorator_list)
    if any(f"{kind}(" in decorated for kind in ("command", "option", "argument")):
        return 0
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def levels(node: ast.AST) -> int:
    """How deep blocks stand in one another. An `elif` is as deep as its `if`; functions within count alone."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.ClassDef | ast.expr):
            is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
            deepest = max(deepest, levels(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def test_a_function_can_be_held_in_the_head_or_says_why_not() -> None:
    large = {
        name: (lines(each), parameters(each), levels(each))
        for name, each in functions()
        if lines(each) > LINES or parameters(each) > PARAMETERS or levels(each) > LEVELS
    }
    assert {name: size for name, size in large.items() if name not in LEFT} == {}
    assert set(LEFT) - set(large) == set()  # an exception that is needed no more goes
