"""What fills the folder of an artefact: a process of its own, which says how far it is and ends with a JSON object."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from embedctl.child import guarded
from embedctl_config.errors import EmbedctlError, ModelError

log = logging.getLogger(__name__)


def run_child(module: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Run a module that fills an artefact's folder: its progress goes to the log.

    Args:
        request: its argument; it names the model, `name`, and the `kind` of artefact.

    Returns:
        The JSON object that it ends with.

    Raises:
        ModelError: that object is an error, or there is none.
    """
    with subprocess.Popen(
        guarded([sys.executable, "-m", module, json.dumps(request)]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # what the exporters have to say to their developers
        text=True,
        errors="replace",
    ) as child:
        assert child.stdout is not None
        facts: dict[str, Any] = {"error": "the process that builds it died, as for want of memory"}
        for line in child.stdout:
            if line.startswith("{"):
                facts = json.loads(line)
            else:
                log.info("building %s of %s: %s", request["kind"], request["name"], line.strip())
    if "error" in facts:
        raise ModelError(f"model {request['name']!r} can't be built as {request['kind']}: {facts['error']}")
    return facts


def answer(build: Callable[[Mapping[str, Any], Callable[[str], None]], dict[str, Any]], advice: str) -> None:
    """In such a process: have a function fulfil the request of the command line, and print what it answers.

    Args:
        build: is told the request, and what to call with a line of progress.
        advice: what to do where it fails in a way of which nothing is known.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    request = json.loads(sys.argv[1])
    progress = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print, and what they start, is no progress of ours
    say = partial(print, file=progress, flush=True)
    try:
        facts = build(request, say)
    except EmbedctlError as error:
        facts = {"error": str(error)}
    except Exception as error:  # noqa: BLE001  (exporters and compilers fail in as many ways as there are models)
        line = str(error).partition("\n")[0][:300]
        facts = {"error": f"{type(error).__name__}: {line}; {advice}"}
    say(json.dumps(facts))
