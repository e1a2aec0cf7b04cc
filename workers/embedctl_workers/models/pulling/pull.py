"""`embedctl model pull`: a model of the hub, checked byte by byte, into the hub's cache."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from embedctl_config.errors import HubUnavailable, ModelError, ModelNotFound, SettingsError
from embedctl_config.hardware import ModelEntry
from embedctl_config.model_names import hub_id
from embedctl_config.settings import Settings
from embedctl_workers.models.deciding import (
    ADAPTER,
    NAMING,
    check_named,
    deciding,
    module_folders,
    refuse_adapters,
)
from embedctl_workers.models.files import cached_folder, deciding_files, fingerprint_of, folder_without_hub
from embedctl_workers.models.pulling.hub import Hub, HubFile, Listing, Retry
from embedctl_workers.models.pulling.progress import Progress, megabytes
from embedctl_workers.models.pulling.snapshot import Snapshots, digest_of

#: What Python unpickles as it loads them: such a file can run any code.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
_WEIGHTS = (".safetensors", ".bin")
#: Files that name the parts of weights. They decide nothing by themselves, but the parts can't be loaded without.
_INDEXES = {"model.safetensors.index.json": ".safetensors", "pytorch_model.bin.index.json": ".bin"}
#: The largest file that is read before the weights are downloaded (bytes).
_MOST_JSON = 10 * 1024 * 1024
_REVISION = re.compile(r"[\w.@+-]+(/[\w.@+-]+)*")
_REFUSED = (401, 403)
#: Letters of a commit that people read.
_SHORT = 12


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model on this machine, by its fingerprint, a sha256 in hexadecimal.

    `repository`, `revision` and `commit` are those of the hub; empty if it does not come from there. Its files have
    `size` bytes, and `downloaded` of them came over the network.
    """

    name: str
    repository: str
    revision: str
    commit: str
    folder: Path
    fingerprint: str
    size: int = 0
    downloaded: int = 0


def pull(
    name: str,
    settings: Settings,
    progress: Progress,
    *,
    revision: str = "",
    allow_pickle: bool = False,
    if_missing: bool = False,
) -> Pulled:
    """Download a model, unless this machine has it.

    Args:
        revision: a branch, tag or commit; empty: that of the name's entry in the settings, else `main`.
        allow_pickle: also take weights that can run code when they are loaded.
        if_missing: do not ask the hub if there is a model of this name, whatever its commit is.

    Raises:
        ModelNotFound: the hub has no such model or revision, or does not show it.
        HubUnavailable: the hub can't be reached.
        ModelError: the model can't be used, is not what the hub lists, or can't be written.
        SettingsError: the name or the revision is none.
        ImportError: the hub's client is not installed.
    """
    entry = settings.models.get(name, ModelEntry())
    source = entry.source or name
    if not revision and (folder := folder_without_hub(source)):
        progress.say(f"{name} is in {folder}: there is nothing to download")
        return Pulled(name, "", "", "", folder, fingerprint_of(folder, entry.pooling))
    wanted = revision or entry.revision or "main"
    if not _REVISION.fullmatch(wanted) or {"..", "."} & set(wanted.split("/")):
        raise SettingsError(f"{wanted!r} is no branch, tag or commit of a model")
    return _Pull(name, entry, wanted, progress, allow_pickle).run(if_missing=if_missing)


class _Pull:
    def __init__(self, name: str, entry: ModelEntry, revision: str, progress: Progress, allow_pickle: bool) -> None:
        from huggingface_hub import constants

        self._name, self._entry, self._revision = name, entry, revision
        self._repository = hub_id(entry.source or name)
        self._progress, self._allow_pickle = progress, allow_pickle
        self._offline = constants.HF_HUB_OFFLINE
        self._cache = Path(constants.HF_HUB_CACHE)
        self._snapshots = Snapshots(self._cache, self._repository)
        self._hub = Hub(progress.say)
        self._downloaded = 0

    def run(self, *, if_missing: bool) -> Pulled:
        if (self._offline or if_missing) and (here := self._here()):
            if not if_missing:
                self._progress.say(f"HF_HUB_OFFLINE is set: the hub is not asked whether {self._name} has changed")
            return here
        with self._translated(), self._snapshots.locked(f"downloads {self._name}"):
            # Another process may have downloaded it meanwhile.
            if if_missing and (here := self._here()):
                return here
            before = self._snapshots.commit_of(self._revision)
            listing = self._hub.listing(self._repository, self._revision)
            return self._pull(listing, before)

    def _pull(self, listing: Listing, before: str | None) -> Pulled:
        files = self._needed(listing)
        self._download(listing, files)
        folder = self._snapshots.link(listing, [file.name for file in files])
        fingerprint = fingerprint_of(folder, self._entry.pooling)
        if self._entry.fingerprint not in ("", fingerprint):
            raise ModelError(
                f"{self._revision} of {self._name} has fingerprint {fingerprint}, and [models.{self._name}] pins "
                f"{self._entry.fingerprint}: it is downloaded, and not used"
            )
        if before and before != listing.commit:
            self._progress.say(self._moved(before, listing.commit, fingerprint))
        self._snapshots.note(self._revision, listing.commit)
        return self._result(listing.commit, folder, fingerprint)

    def _needed(self, listing: Listing) -> list[HubFile]:
        """The files that the model needs, the small ones first; a ModelError if it can't be used."""
        place = f"{self._repository}@{listing.commit[:_SHORT]}"

        def read(name: str) -> Any:
            return self._json(listing, name) if name in listing.files else None

        folders = module_folders(read, place)
        names = deciding(listing.files.keys(), folders)
        refuse_adapters(place, [*names, *(name for name in listing.files if name == ADAPTER)])
        if not any(name.endswith(_WEIGHTS) for name in names):
            raise ModelError(f"{place} holds no weights (model.safetensors or pytorch_model.bin)")
        if not self._allow_pickle and (pickles := [name for name in names if name.endswith(_PICKLES)]):
            raise ModelError(
                f"{place} needs {pickles[0]}, a pickle, which can run code when it is loaded, and has no safetensors "
                f"in its place. If you trust its author: embedctl model pull {self._name}@{self._revision} "
                "--allow-pickle. Or choose another model or revision"
            )
        for name in names:
            if PurePosixPath(name).name in NAMING:
                try:
                    config = read(name)
                except ValueError as error:
                    raise ModelError(f"{place}/{name} can't be read: {error!r}") from error
                check_named(f"{place}/{name}", PurePosixPath(name).name, config)
        kinds = {PurePosixPath(name).suffix for name in names if "/" not in name}
        names += [name for name in listing.files if name == "README.md"]  # the card says what the model was trained for
        names += [name for name, kind in _INDEXES.items() if name in listing.files and kind in kinds]
        return sorted((listing.files[name] for name in names), key=lambda file: file.size)

    def _json(self, listing: Listing, name: str) -> Any:
        """The contents of a small file, a ValueError if it is no JSON, a ModelError if too large or not as listed."""
        file = listing.files[name]
        if file.size > _MOST_JSON:
            raise ModelError(f"{name} of {self._repository} has {megabytes(file.size)}, which is too much to be read")
        if not self._has(file):
            self._fetch(listing, file)
        return json.loads(self._snapshots.blob(file).read_bytes())

    def _download(self, listing: Listing, files: Sequence[HubFile]) -> None:
        # Files with equal contents are one.
        missing = list({file.digest: file for file in files if not self._has(file)}.values())
        total = sum(file.size for file in missing)
        parts = [self._snapshots.part(file) for file in missing]
        had = sum(part.stat().st_size for part in parts if part.exists())
        whole = f"{self._name} at {self._revision} is commit {listing.commit[:_SHORT]}: {len(files)} files, "
        whole += megabytes(sum(file.size for file in files))
        if not missing:
            self._progress.say(f"{whole}; all of them are on this machine")
            return
        again = f", and {megabytes(had)} of it is there from an earlier try" if had else ""
        self._progress.say(f"{whole}; {megabytes(total)} to download to {self._cache}{again}")
        free = shutil.disk_usage(self._snapshots.folder).free
        if (needed := total - had) > free:
            raise ModelError(
                f"{self._name} needs {megabytes(needed)} more in {self._cache}, and {megabytes(free)} are free: make "
                "room there, or set HF_HUB_CACHE to another folder, for workers too"
            )
        self._progress.begin(total, had)
        for file in missing:
            self._fetch(listing, file)

    def _has(self, file: HubFile) -> bool:
        """Whether a file is there and is what the hub lists; one that is not is removed."""
        blob = self._snapshots.blob(file)
        if not blob.exists():
            return False
        if digest_of(blob, file) == file.digest:
            return True
        self._progress.say(f"{file.name} on this machine is damaged: it is downloaded again")
        blob.unlink()
        return False

    def _fetch(self, listing: Listing, file: HubFile) -> None:
        """Download a file, check it, and give it its name; a ModelError if it is not what the hub lists."""
        part = self._snapshots.part(file)
        resumed = part.exists() and part.stat().st_size > 0
        self._hub.fetch(listing, file, part, self._advance)
        found = digest_of(part, file)
        if found == file.digest:
            self._snapshots.accept(file)
            return
        part.unlink()
        if resumed:  # by now the earlier part may be of something else
            self._progress.say(f"{file.name} does not fit what came before: it is downloaded again")
            self._progress.advance(-file.size)
            self._fetch(listing, file)
            return
        raise ModelError(
            f"{file.name} of {self._repository}: what came has the hash {found[:_SHORT]}…, and {self._hub.host} lists "
            f"{file.digest[:_SHORT]}…: it was changed or damaged on the way, and nothing of it is kept"
        )

    def _advance(self, more: int) -> None:
        self._downloaded += max(0, more)
        self._progress.advance(more)

    def _here(self) -> Pulled | None:
        """The model as this machine has it; None if it does not."""
        try:
            folder = cached_folder(self._repository, self._revision)
            return self._result(folder.name, folder, fingerprint_of(folder, self._entry.pooling))
        except ModelError:
            return None

    def _result(self, commit: str, folder: Path, fingerprint: str) -> Pulled:
        size = sum(path.stat().st_size for path in deciding_files(folder))
        return Pulled(self._name, self._repository, self._revision, commit, folder, fingerprint, size, self._downloaded)

    def _moved(self, before: str, after: str, fingerprint: str) -> str:
        try:
            same = fingerprint_of(self._snapshots.snapshot(before), self._entry.pooling) == fingerprint
        except ModelError:  # it is not whole, or gone
            same = False
        vectors = "the same vectors" if same else "other vectors"
        return f"{self._revision} of {self._name} moved from {before[:_SHORT]} to {after[:_SHORT]}: {vectors}"

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn the client's errors into one line that names what mends them."""
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        name, host = self._name, self._hub.host
        try:
            yield
        except OfflineModeIsEnabled as error:
            raise HubUnavailable(
                f"HF_HUB_OFFLINE is set, so {host} is not asked for {name}: unset it. {self._mend()}"
            ) from error
        except Retry as error:
            raise HubUnavailable(f"{name} can't be downloaded: {error}. {self._mend()}") from error
        except GatedRepoError as error:
            raise ModelError(
                f"{self._repository} on {host} asks for consent: give it on the model's page, and set HF_TOKEN to a "
                "token of that account"
            ) from error
        except RevisionNotFoundError as error:
            raise ModelNotFound(
                f"{self._repository} on {host} has no branch, tag or commit {self._revision!r}"
            ) from error
        except (HfHubHTTPError, HFValidationError) as error:
            status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
            # The hub says the same of a model that it does not show to everyone.
            if isinstance(error, RepositoryNotFoundError | HFValidationError) or status in _REFUSED:
                raise ModelNotFound(
                    f"{host} shows no model {self._repository!r}: correct the name, or set HF_TOKEN to a token that "
                    "may read it"
                ) from error
            raise ModelError(f"{host} answers {status} for {name}") from error
        except OSError as error:
            raise ModelError(f"{name} can't be written to {self._cache}: {error}") from error

    def _mend(self) -> str:
        here = self._snapshots.commit_of(self._revision)
        usable = f"Commit {here[:_SHORT]} of it is on this machine. " if here and self._here() else ""
        return (
            f"{usable}Or pull it on a machine with a network and copy the folder {self._snapshots.folder.name} from "
            f"there to {self._cache}, or give --model a folder that holds the model"
        )
