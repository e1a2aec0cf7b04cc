"""Processes that measure at the same time, for `embedctl model tune`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from embedctl.common.processes import running
from embedctl_config.errors import ModelError


@contextmanager
def measuring(
    model: str, commands: Sequence[Sequence[str]]
) -> Iterator[tuple[dict[str, Any], Callable[[float], float]]]:
    """A context with a process for each command. Call it in the main thread.

    Each prints a JSON object of facts when it has loaded the model, and then answers each line with a rate. If this
    process is killed, the kernel ends them. The context gives the facts of the first, and a function that sends a line
    to all of them: the sum of their answers. A ModelError says that one ended, as when it can't load the model; it has
    printed the reason.
    """
    with ExitStack() as stack:
        children = [
            stack.enter_context(running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0))
            for command in commands
        ]

        def answers() -> list[Any]:
            lines = [child.stdout.readline() for child in children if child.stdout]
            if not all(line.endswith(b"\n") for line in lines):  # one ended, perhaps within a line
                raise ModelError(
                    f"model {model!r} can't be measured: the measuring process ended; see its messages above"
                )
            return [json.loads(line) for line in lines]

        def ask(question: float) -> float:
            for child in children:
                if child.stdin:
                    with suppress(BrokenPipeError):  # it has ended, so it has no answer either
                        child.stdin.write(f"{question}\n".encode())
            return float(sum(answers()))

        yield answers()[0], ask
