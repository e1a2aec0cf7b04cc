"""The hub's listing of a model, and the bytes of its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from embedctl_config.errors import ModelError, SettingsError
from embedctl_config.retry import OUTSIDE, Streak

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

T = TypeVar("T")

_SHA1, _SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
_PARTIAL, _NO_SUCH_RANGE = 206, 416
#: Answers after which the same question may have another one.
_PASSING = (408, 429, 500, 502, 503, 504)
#: The longest pause that a hub may ask for (seconds).
_LONGEST_PAUSE_S = 300.0
#: Most names in a listing, and most characters of a name: a hub that promises more is not believed.
_MOST_FILES, _LONGEST_NAME = 100_000, 1_000


class Retry(Exception):
    """Raised when the hub has failed to answer, and may answer later; it says in words how, and its cause is the error.

    `asked_s` is the pause that the hub asks for (seconds); 0 if it asks for none.
    """

    def __init__(self, said: str, asked_s: float = 0.0) -> None:
        super().__init__(said)
        self.asked_s = asked_s


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of `size` bytes as the hub lists it. Its name, relative to the model's folder, leads nowhere else:
    checked.

    `digest` is the sha256 of a large file (Git LFS), else the sha1 of its Git blob; the cache names the file so.
    """

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a model at one commit, by their names."""

    repository: str
    commit: str
    files: Mapping[str, HubFile]


class Hub:
    """A hub, by its client's settings: HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and the others.

    `say` is told in one line what it waits for. If HF_ENDPOINT is no address, that is a SettingsError.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        from huggingface_hub import constants

        self._endpoint = constants.ENDPOINT
        self._timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        self._say = say
        #: For messages: without a user or a password.
        self.host = _host(self._endpoint)

    def listing(self, repository: str, revision: str) -> Listing:
        """The files of a model at a branch, tag or commit.

        Raises:
            Retry: the hub can't be asked, or not now.
            ModelError: what it answers can't be used, or is no hub's answer.
            huggingface_hub.errors.HfHubHTTPError, OfflineModeIsEnabled, HFValidationError: it refuses, or is not asked.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        api = HfApi(endpoint=self._endpoint)
        try:
            found = self._retried(
                lambda: api.model_info(repository, revision=revision, files_metadata=True, timeout=self._timeout_s),
                tries=3,
            )
        except (HfHubHTTPError, HFValidationError):  # some of them are ValueErrors
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise ModelError(f"{self.host} does not answer as a hub does: is HF_ENDPOINT right?") from error
        if not (found.sha and _SHA1.fullmatch(found.sha)):
            raise ModelError(f"{self.host} names no commit for {revision} of {repository}")
        siblings = found.siblings or []
        if len(siblings) > _MOST_FILES:
            raise ModelError(f"{self.host} lists {len(siblings):,} files for {repository}, and a model has fewer")
        files = [self._checked(each, repository) for each in siblings]
        return Listing(repository, found.sha, {file.name: file for file in files})

    def fetch(self, listing: Listing, file: HubFile, part: Path, advance: Callable[[int], None]) -> None:
        """Download a file to `part`, from its end on if a part of it is there. Its contents are not checked.

        `advance` is told how many more bytes are there; less than 0 if they are fetched again.

        Raises:
            Retry: the connection broke, or the hub refused for now, several times without a further byte.
            OSError: the part can't be written.
            huggingface_hub.errors.HfHubHTTPError, OfflineModeIsEnabled: the hub refuses, or is not asked.
        """
        breaks = Streak()
        part.touch()
        self._retried(lambda: self._stream(listing, file, part, advance, breaks), tries=5, streak=breaks)

    def _stream(
        self, listing: Listing, file: HubFile, part: Path, advance: Callable[[int], None], breaks: Streak
    ) -> None:
        """Fetch what is missing of a file, in one request; _BrokenOff if less came than was promised."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # its reference documents them
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        had = part.stat().st_size
        if had > file.size:
            had = _emptied(part, had, advance)
        if had == file.size:
            return
        url = hf_hub_url(listing.repository, file.name, revision=listing.commit, endpoint=self._endpoint)
        # The client takes the token out of the headers when it is sent on to another host.
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if had:
            headers["Range"] = f"bytes={had}-"
        with get_session().stream("GET", url, headers=headers, timeout=self._timeout_s) as response:
            if had and response.status_code == _NO_SUCH_RANGE:
                _emptied(part, had, advance)
                raise _BrokenOff
            hf_raise_for_status(response)
            if had and not (
                response.status_code == _PARTIAL
                and response.headers.get("Content-Range", "").startswith(f"bytes {had}-")
            ):
                had = _emptied(part, had, advance)  # the whole file comes
            with part.open("ab") as stream:
                for piece in _first(response.iter_bytes(), file.size - had):
                    stream.write(piece)
                    advance(len(piece))
                    had += len(piece)
                    breaks.end()
        if had < file.size:
            raise _BrokenOff

    def _retried(self, ask: Callable[[], T], *, tries: int, streak: Streak | None = None) -> T:
        """Ask until there is an answer. Raises Retry after so many failures in a row."""
        from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's

        def once() -> T:
            try:
                return ask()
            except HfHubHTTPError as error:
                status = error.response.status_code
                if status not in _PASSING:
                    raise
                after = error.response.headers.get("Retry-After", "")
                asked_s = float(after) if after.strip().isdecimal() else 0.0  # a date, or missing
                asks = f" and asks for a pause of {asked_s:g} s" if asked_s else ""
                raise Retry(f"{self.host} answers {status}{asks}", asked_s) from error
            except (HTTPError, _BrokenOff) as error:
                # The message of such an error may hold a signed address.
                raise Retry(f"the connection to {self.host} failed ({type(error).__name__})") from error

        def failed(error: Retry, pause_s: float) -> float:
            if error.asked_s > _LONGEST_PAUSE_S:
                raise error
            pause_s = error.asked_s or pause_s
            self._say(f"{error}: trying again in {pause_s:g} s")
            return pause_s

        return OUTSIDE.call(once, Retry, failed=failed, tries=tries, streak=streak)

    def _checked(self, found: RepoSibling, repository: str) -> HubFile:
        """A file of a listing; a ModelError if its name leads out of the model's folder, or it lacks size or digest."""
        name = found.rfilename
        path = PurePosixPath(name)
        if (
            not (name and name.isprintable() and len(name) <= _LONGEST_NAME)
            or path.is_absolute()
            or str(path) != name
            or ".." in path.parts
            or "\\" in name
        ):
            raise ModelError(
                f"{self.host} lists the file {name[:100]!r} for {repository}, and that is no name of a file below the "
                "model's folder: nothing is downloaded"
            )
        size, digest = (found.lfs.size, found.lfs.sha256) if found.lfs else (found.size, found.blob_id)
        if not isinstance(size, int) or size < 0 or not (_SHA256 if found.lfs else _SHA1).fullmatch(str(digest)):
            raise ModelError(
                f"{self.host} lists the file {name!r} of {repository} without its size or its hash, so it can't be "
                "checked: nothing is downloaded"
            )
        return HubFile(name, size, str(digest))


def _host(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        parts, port = urlsplit(""), ""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        # It is not shown: it may hold a password.
        raise SettingsError("HF_ENDPOINT is no address of a hub: https://HOST is expected")
    return parts.hostname + port


class _BrokenOff(Exception):
    """Raised when less of a file came than was promised."""


def _first(pieces: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The first bytes of a stream: more than was promised is not stored."""
    for piece in pieces:
        yield piece[:size]
        size -= len(piece)
        if size <= 0:
            return


def _emptied(part: Path, had: int, advance: Callable[[int], None]) -> int:
    part.write_bytes(b"")
    advance(-had)
    return 0
