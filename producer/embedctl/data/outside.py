"""The bytes of chunks in a store outside of Redis: a folder that all machines share, or a bucket."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from embedctl.data.files import Files
from embedctl.data.planes import DataPlane, Entry, Places, Where
from embedctl.data.references import Reference, parse_reference, reference_to
from embedctl_config.errors import DataUnavailable, EmbedctlError, SettingsError, WireForeign
from embedctl_config.settings import Settings

#: The name of the file that says which store this is.
_MARK = "embedctl-data.json"
#: Chunks whose bytes share a folder, so that no listing grows with the job.
_SHARD = 500


class Outside(DataPlane):
    """Keeps the bytes in the store of `data_url`, and a reference to them in Redis.

    Names are `DATABASE/DAY/JOB/in|out/SHARD/CHUNK.TOKEN`: `DATABASE` is what :paramref:`database` says, so that each
    Redis has a part of its own, and `TOKEN` is new for each put, so that nothing is ever replaced. A small chunk stays
    in Redis: a store takes longer for it than Redis needs memory.

    Args:
        database: which database of Redis this is.
        places: remembers stores; nothing does if None.
    """

    is_outside: ClassVar[bool] = True

    def __init__(self, settings: Settings, database: Callable[[], str], places: Places | None = None) -> None:
        self._files = files_at(settings.data_url)
        self._url = settings.data_url
        self._inline = settings.data_inline_bytes
        self._database = database
        self._places = places
        self._store: str | None = None

    @property
    def store(self) -> str:
        if self._store is None:
            with self._explained():
                try:
                    mark = self._files.read(_MARK)
                except FileNotFoundError:
                    raise self._without_mark() from None
            self._store = _id_in(mark, self._url)
        return self._store

    def _without_mark(self) -> EmbedctlError:
        """Who asks for the store has a job with chunks in one. So a folder without a mark may yet be mounted."""
        if self._files.may_be_another:
            return DataUnavailable(
                f"data_url {self._url} holds no {_MARK}: is the folder mounted here, and is it what the producers use?"
            )
        return SettingsError(f"data_url {self._url} holds no {_MARK}: it is not what the producers use")

    def made_store(self) -> str:
        if self._store is None:
            with self._explained():
                try:
                    self._files.read(_MARK)
                except FileNotFoundError:
                    self._make_store()
            if self._places is not None:
                self._places.note(self._url, self.store)
        return self.store

    def _make_store(self) -> None:
        known = None if self._places is None else self._places.store_at(self._url)
        if known is not None:
            raise DataUnavailable(
                f"data_url {self._url} held store {known}, and holds no {_MARK} now: is the folder mounted here? If it "
                "was emptied on purpose, take another name for the new one"
            )
        mark = json.dumps({"id": secrets.token_hex(8), "what": "chunks of embedctl's jobs"}).encode()
        with suppress(FileExistsError):  # another producer was faster
            self._files.write_first(_MARK, mark)

    def put(self, where: Where, payload: bytes) -> bytes:
        if len(payload) <= self._inline:
            return payload
        job_id = where.job_id
        shard = f"{where.chunk // _SHARD:06d}"
        token = secrets.token_hex(8)
        name = f"{self._database()}/{job_id[:8]}/{job_id}/{where.kind}/{shard}/{where.chunk}.{token}"
        store = self.store
        with self._explained():
            if self._files.may_be_another:
                self._check_place()
            self._files.write(name, payload)
        return reference_to(payload, name, store)

    def get(self, value: bytes, size: int | None = None) -> bytes | None:
        reference = parse_reference(value)
        if reference is None:
            return value[:size]
        self._check(reference)
        with self._explained():
            try:
                data = self._files.read(reference.name, size)
            except FileNotFoundError:
                self._check_place()
                return None
        if not reference.fits(data, size):
            raise WireForeign(f"{reference.name} in data_url {self._url} is damaged: it is not what was put there")
        return data

    def put_back(self, value: bytes, payload: bytes) -> None:
        reference = parse_reference(value)
        if reference is None:
            return
        with self._explained():
            try:
                self._files.read(reference.name, 1)
            except FileNotFoundError:
                self._check_place()
                self._files.write(reference.name, payload)

    def delete(self, values: Sequence[bytes]) -> None:
        found = [reference for value in values if (reference := parse_reference(value)) is not None]
        names = [each.name for each in found if each.store == self.store]
        if names:
            with self._explained():
                self._files.remove(names)

    def list(self, folder: str) -> Iterator[Entry]:
        top = self._database()
        with self._explained():
            found = self._files.names(f"{top}/{folder}" if folder else top)
        for each in found:
            yield Entry(each.name[len(top) + 1 :], each.is_folder, each.modified)

    def remove_names(self, names: Sequence[str]) -> None:
        """Remove what :meth:`list` named. Raises as :meth:`delete` does."""
        with self._explained():
            self._files.remove([f"{self._database()}/{name}" for name in names])

    def remove_empty(self, folder: str) -> None:
        """Remove a folder that :meth:`list` named, if nothing is left in it. Raises as :meth:`delete` does."""
        with self._explained():
            self._files.remove_empty(f"{self._database()}/{folder}")

    def now(self) -> float | None:
        """The time by the store's own clock, in seconds since 1970; None if it can't be known.

        Raises as :meth:`put` does.
        """
        folder = f"{self._database()}/clock"
        name = f"{folder}/{secrets.token_hex(8)}"
        with self._explained():
            if self._files.may_be_another:
                self._check_place()
            self._files.write(name, b"?")
            found = self._files.names(folder)
            self._files.remove([each.name for each in found])  # also those of processes that were killed
        return next((each.modified for each in found if each.name == name and math.isfinite(each.modified)), None)

    def _check_place(self) -> None:
        """See that what is there is still this store: a share may be unmounted, or another one mounted in its place.

        Raises:
            DataUnavailable: it is not.
        """
        try:
            mark = self._files.read(_MARK)
        except FileNotFoundError:
            raise DataUnavailable(
                f"data_url {self._url} no longer holds {_MARK}: is the folder mounted here?"
            ) from None
        if _id_in(mark, self._url) != self.store:
            raise DataUnavailable(f"data_url {self._url} is now another store than it was: what is mounted here?")

    def _check(self, reference: Reference) -> None:
        if reference.store != self.store:
            raise SettingsError(
                f"the job's chunks are in another store than data_url {self._url}: set it to what the job's producer "
                "has"
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise what the store refuses as an error of ours."""
        try:
            yield
        except EmbedctlError:  # some are OSErrors too
            raise
        except FileNotFoundError as error:
            raise DataUnavailable(f"data_url {self._url} is not there: {error}") from error
        except OSError as error:
            raise DataUnavailable(
                f"data_url {self._url} can't be used now: {error}. Chunks are kept there; what waits goes on by itself"
            ) from error


def files_at(url: str) -> Files:
    """The store with this path or URL; nothing is opened yet.

    Raises:
        SettingsError: it is neither an absolute path nor a URL.
    """
    scheme, mark, rest = url.partition("://")
    if mark and scheme != "file":
        from embedctl.data.remote import RemoteFiles

        return RemoteFiles(url)
    path = Path(rest if mark else url)
    if not path.is_absolute():
        raise SettingsError(f"data_url {url} is neither an absolute path nor a URL such as s3://BUCKET/PREFIX")
    from embedctl.data.folder import LocalFiles

    return LocalFiles(path)


def _id_in(mark: bytes, url: str) -> str:
    try:
        found = json.loads(mark)["id"]
        if len(bytes.fromhex(found)) == 8:
            return str(found)
    except (ValueError, LookupError, TypeError):
        pass
    raise SettingsError(f"data_url {url}: its {_MARK} can't be read: it is not embedctl's, or damaged")
