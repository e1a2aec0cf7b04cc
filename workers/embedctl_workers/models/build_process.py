"""Builds of artefacts, each in a process of its own, which logs its progress and ends with a JSON object."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from embedctl.common.processes import running
from embedctl_config.errors import EmbedctlError, MissingExtra, ModelError
from embedctl_config.outputs import outputs_of
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import Artifact, ArtifactStore, Wanted
from embedctl_workers.models.builders import BuildOptions
from embedctl_workers.models.files import ModelFiles

log = logging.getLogger(__name__)


def found_or_built(
    files: ModelFiles, want: Wanted, host: Host, how: BuildOptions, ready: Callable[[], None], **more: Any
) -> Artifact:
    """An artefact from the cache, or built now by its kind's module of `building/`; of `how`, the revision and `force`
    count.

    `ready` raises MissingExtra if a package that builds it is not installed; `more` is as for :func:`request_for`. A
    ModelError if it can't be built, or the cache lacks it and `host.build` is False.
    """
    store, kind = ArtifactStore(host.cache), want.recipe["kind"]
    if not how.force and (found := store.find(want)):
        return found
    if not host.build:
        raise ModelError(
            f"model {files.name!r} has no artefact {want.name} in {host.cache}, and --no-build forbids building it: "
            f"run `embedctl model build {files.name} --class CLASS` with this worker's class, or copy it from a "
            "machine that has it"
        )
    ready()
    module = f"embedctl_workers.building.{kind.partition('-')[0]}"  # onnx-int8 is made as onnx is

    def fill(folder: Path) -> Mapping[str, Any]:
        return run_build(module, request_for(files, host, kind, folder, revision=how.revision, **more))

    return store.build(want, fill, force=how.force)


def require(extra: str, *packages: str) -> None:
    """Raise MissingExtra if a package that builds an artefact is not installed."""
    if not all(map(find_spec, packages)):
        raise MissingExtra(extra, "building an artefact")


def request_for(
    files: ModelFiles, host: Host, kind: str, folder: Path, *, revision: str = "", **more: Any
) -> Mapping[str, Any]:
    """What :func:`run_build` takes, to fill the folder of an artefact of this kind.

    `revision` is the hub's, for the manifest; `more` is what this kind is built of besides, in types of JSON.
    """
    return {
        "name": files.name,
        "source": str(files.folder),
        "fingerprint": files.fingerprint,
        "pooling": files.pooling,
        "outputs": list(files.outputs),
        "revision": revision,
        "kind": kind,
        "threads": host.threads,
        "cache": str(host.cache),
        "folder": str(folder),
        **more,
    }


def read_request(request: Mapping[str, Any]) -> tuple[ModelFiles, Host, Path]:
    """The model, the host and the folder of a :func:`request_for`."""
    known = (request["name"], Path(request["source"]), request["fingerprint"], request["pooling"])
    files = ModelFiles(*known, outputs_of(request["outputs"]))
    return files, Host(request["threads"], Path(request["cache"])), Path(request["folder"])


def run_build(module: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Run a module of `building/`, which fills an artefact's folder; its progress goes to the log.

    Returns what the manifest is to say: the JSON object that the process ends with. A ModelError if it is an error.
    """
    with running(
        [sys.executable, "-m", module, json.dumps(request)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # messages of the exporters for their own developers
        text=True,
        errors="replace",
        start_new_session=False,  # Ctrl-C reaches the compilers that it starts, too
    ) as child:
        assert child.stdout is not None
        facts: dict[str, Any] = {"error": "the process that builds it died, as for want of memory"}
        for line in child.stdout:
            if line.startswith("{"):
                facts = json.loads(line)
            else:
                log.info("building %s of %s: %s", request["kind"], request["name"], line.strip())
        child.wait()
    if "error" in facts:
        raise ModelError(f"model {request['name']!r} can't be built as {request['kind']}: {facts['error']}")
    return facts


def answer_request(build: Callable[[Mapping[str, Any], Callable[[str], None]], dict[str, Any]], advice: str) -> None:
    """In the process of a build: run a function on the request of the command line, and print its answer as JSON.

    The function also gets one to call with each line of progress. `advice` says what the user can do if the build fails
    in an unknown way.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    request = json.loads(sys.argv[1])
    progress = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries, and the processes that they start, print here too: that is no progress
    say = partial(print, file=progress, flush=True)
    try:
        facts = build(request, say)
    except EmbedctlError as error:
        facts = {"error": str(error)}
    except Exception as error:  # noqa: BLE001  (each exporter and compiler fails in ways of its own)
        line = str(error).partition("\n")[0][:300]
        facts = {"error": f"{type(error).__name__}: {line}; {advice}"}
    say(json.dumps(facts))
