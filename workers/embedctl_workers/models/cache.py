"""The cache folder, which holds what was built for a model and this machine: safe writes, locks, and trust; and
findings about a model here, in JSON, by the facts that they hold for."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import embedctl_workers
from embedctl_config import durable
from embedctl_config.cpu import cpu_identity
from embedctl_config.errors import ModelError
from embedctl_config.settings import Settings, expanded

log = logging.getLogger(__name__)

_SHIPPED = files("embedctl_workers.models") / "known"
_UID_MAP = Path("/proc/self/uid_map")
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
#: The mode of what other users may read, and only this user may write: otherwise it would not be trusted.
_READABLE = 0o644
#: The libraries that make vectors of texts on a CPU.
_LIBRARIES = ("torch", "numpy", "onnxruntime", "tokenizers", "safetensors", "transformers", "sentence-transformers")
#: How the variables begin that tell them how to compute.
_VARIABLES = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCH_")
_PACKAGE = Path(embedctl_workers.__file__).parent


def cache_folder(settings: Settings) -> Path:
    """The setting `cache_dir`, else `embedctl` in the XDG cache folder. The folder may not exist yet."""
    if settings.cache_dir:
        return expanded(settings.cache_dir, "cache_dir")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(base, "cache_dir") / "embedctl"


def private_folder(folder: Path) -> Path:
    """Make a folder unless it exists (or OSError); a ModelError if another user can write to it or replace it.

    Files of the cache are executed or decide vectors, so another user must not be able to change them.
    """
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o755, exist_ok=True)
    if wrong := distrusted(folder):
        raise ModelError(
            f"workers run files from {folder}, and another user could replace them: {wrong}. Or set cache_dir "
            "(EMBEDCTL_CACHE_DIR) to a folder of your own, below folders that only you or root can write to"
        )
    return folder


def distrusted(path: Path) -> str:
    """Why a file or folder is not trusted, and the commands that repair it; an OSError if it does not exist.

    Empty if it is trusted: it is this user's, and no other user can write to it or replace it.
    """
    flaws = list(_flaws(path))
    if not flaws:
        return ""
    mend = " && ".join(flaw.mend for flaw in flaws)
    by = "" if os.getuid() == 0 or not any(flaw.needs_root for flaw in flaws) else " (as root)"
    return f"{', and '.join(flaw.words for flaw in flaws)}. To repair it{by}: {mend}"


def keep(path: Path, data: bytes) -> None:
    """Write or replace a file of the cache that no other user can write to; an OSError, or as :func:`private_folder`.

    A process that is killed meanwhile leaves the previous file, or none. A link at this path is replaced, not its
    target.
    """
    private_folder(path.parent)
    durable.write(path, data, mode=_READABLE)


def kept(path: Path) -> bytes | None:
    """The contents of a file of the cache; None if there is none, or it is not trusted, which is logged."""
    try:
        if wrong := distrusted(path):
            log.warning("%s is not trusted and is made again: %s", path, wrong)
            return None
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s can't be read and is made again: %s", path, error)
        return None


def shipped(name: str) -> bytes | None:
    """The contents of a file that comes with the package for a known model, by its name; None if there is none."""
    file = _SHIPPED / name
    return file.read_bytes() if file.is_file() else None


def make_readable(path: Path) -> None:
    """Let other users read a file, and only this user write to it: otherwise it would not be trusted."""
    path.chmod(_READABLE)


def locked(path: Path, doing: str = "") -> AbstractContextManager[None]:
    """Hold the lock of a file or folder of the cache, once nobody else does; `doing` is for the log (empty: builds it).

    An OSError if the lock's file is a link, which is not followed, or can't be made.
    """
    return durable.locked(path.with_name(f".{path.name}.lock"), holder=doing or f"builds {path.name}")


@dataclass(frozen=True, slots=True)
class _Flaw:
    words: str
    mend: str
    needs_root: bool


def _flaws(path: Path) -> Iterator[_Flaw]:
    """What other users can change about a path: itself, a link on the way, or a folder above."""
    me = os.getuid()
    own, facts = _own_uids(), path.stat()
    if facts.st_uid != me:
        yield _owner(path.resolve(), facts.st_uid)
    if facts.st_mode & 0o022:
        yield _mode(path, facts)
    whole = path.absolute()
    above = dict.fromkeys((*whole.parents, *path.resolve().parents))
    for each in (whole, *above):
        entry = each.lstat()
        if entry.st_uid not in own and (each != whole or each.is_symlink()):
            yield _owner(each, entry.st_uid)
    for folder in above:
        facts = folder.stat()
        if facts.st_uid not in own and folder.is_symlink():
            yield _owner(folder.resolve(), facts.st_uid)
        if facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
            yield _mode(folder, facts, above=True)


def _owner(path: Path, uid: int) -> _Flaw:
    me = os.getuid()
    link = "-h " if path.is_symlink() else ""
    words = f"{path} belongs to user {uid}, and this is user {me}"
    return _Flaw(words, f"chown {link}{me} {shlex.quote(str(path))}", needs_root=True)


def _mode(path: Path, facts: os.stat_result, *, above: bool = False) -> _Flaw:
    """The flaw of a mode that lets others write.

    A folder of root's that this user needs, such as a volume of a group, stays writable and gets the sticky bit: then
    only the owner of an entry can replace it.
    """
    mode = "+t" if above and facts.st_uid == 0 != os.getuid() else "go-w"
    others = "everyone" if facts.st_mode & 0o002 else f"group {facts.st_gid}"
    words = f"{path} can be written to by {others} (mode {stat.S_IMODE(facts.st_mode):o})"
    return _Flaw(words, f"chmod {mode} {shlex.quote(str(path))}", needs_root=facts.st_uid != os.getuid())


def _own_uids() -> frozenset[int]:
    """This user and root. A container in which root is not mapped shows root's files as nobody's."""
    own = {0, os.getuid()}
    try:
        mapped = [[int(word) for word in line.split()] for line in _UID_MAP.read_text().splitlines()]
        if not any(inside <= 0 < inside + count for inside, _, count in mapped):
            own.add(int(_OVERFLOW_UID.read_text()))
    except (OSError, ValueError):  # no Linux, or no /proc
        pass
    return frozenset(own)


def noted(cache: Path, kind: str, facts: object) -> Any:
    """What was noted under these facts; None if nothing was, or it can't be read or trusted, which is logged."""
    path = path_of(cache, kind, facts)
    data = kept(path)
    try:
        return None if data is None else json.loads(data)
    except ValueError as error:
        log.warning("%s is damaged and is made again: %s", path, error)
        return None


def note(cache: Path, kind: str, facts: object, finding: object) -> None:
    """Note a finding for :func:`noted`. Where the cache can't be written to, it is found again each time."""
    try:
        keep(path_of(cache, kind, facts), json.dumps(finding).encode())
    except (OSError, ModelError) as error:
        log.debug("what was found is not noted: %s", error)


def software() -> list[object]:
    """What computes on this CPU, beside the files of a model and what was compiled: some findings hold for this alone.

    Files of our package count by their size and time of change, libraries by their version.
    """
    ours = [Path(folder) for folder, _, _ in os.walk(_PACKAGE) if not folder.endswith("__pycache__")]
    return [
        cpu_identity(),
        [_version(name) for name in _LIBRARIES],
        sorted(each for each in os.environ.items() if each[0].startswith(_VARIABLES)),
        [files_in(folder) for folder in ours],
    ]


def files_in(folder: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of change of the files of a folder; none if there is no such folder."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        found = [(each.name, each.stat()) for each in entries if each.is_file()]
    return sorted((name, facts.st_size, facts.st_mtime_ns) for name, facts in found)


@cache
def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def path_of(cache: Path, kind: str, facts: object) -> Path:
    """The file of a finding, which need not be there."""
    return cache / kind / f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]}.json"
