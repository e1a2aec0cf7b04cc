"""The settings of producers and workers, and what they may be: read once, validated as a whole, passed in; and the
bounds that nobody sets."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from embedctl_config.address import address_of
from embedctl_config.errors import SettingsError
from embedctl_config.hardware import (
    DEVICES,
    MOST_WORKERS,
    POOLINGS,
    PRECISIONS,
    SHIPPED_CLASSES,
    HardwareClass,
    ModelEntry,
)
from embedctl_config.printable import printable
from embedctl_config.tenants import DEFAULT, NAME_CHARACTERS, TenantEntry, check_tenant, problems_of

ENV_PREFIX = "EMBEDCTL_"
#: The longest time that a job may be kept (seconds): ten years. None of our clocks and counters overflows by then.
MAX_TTL_S = 10 * 365 * 24 * 3600.0
#: Most records in a chunk. A value in Redis holds at most 512 MiB, so vectors of more than 7,168 dimensions need chunks
#: of fewer records.
MAX_CHUNK_RECORDS = 16_384
#: Most text in a chunk, and so in a record (bytes). Text and ids together stay below a fifth of those 512 MiB.
MAX_CHUNK_BYTES = 64 * 1024 * 1024
#: The message if a Redis is needed and `redis_url` is empty.
NO_REDIS = "no Redis is configured: set EMBEDCTL_REDIS_URL, or use `embedctl run`, which starts one"
#: The same if `url` names a gateway.
NOT_BY_GATEWAY = "this needs Redis, and EMBEDCTL_URL names a gateway: set EMBEDCTL_REDIS_URL in its place"
_SCHEMES = ("redis", "rediss", "unix")
_OF_SENTINELS = ("redis+sentinel:", "rediss+sentinel:")
_LOG_FORMATS = ("auto", "text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that hold everywhere. No source of settings decides them; tests give others."""

    #: A producer pauses while its job has more text than this waiting for workers (bytes). 0: a sixteenth of Redis'
    #: maxmemory, or 256 MiB if that is not set. So several jobs fit beside their results, and each keeps
    #: many workers busy.
    high_water_bytes: int = 0
    #: A job that is drained pauses while Redis holds more of its results than this (bytes). 0: a quarter of maxmemory,
    #: or 1 GiB. A vector of 384 dimensions is about four times as large as the text that it comes from.
    results_high_water_bytes: int = 0
    #: About how many records a part of a drained job holds. Such a part takes 150 MB at 384 dimensions: few files even
    #: for a large corpus, and little to encode again if a drainer dies in the middle of one.
    part_records: int = 100_000
    #: A chunk that is no larger stays in Redis even with `chunk_files` (bytes): a file's own costs exceed its bytes.
    chunk_inline_bytes: int = 4096
    #: Most requests that the gateway answers at once; callers of more are asked to come again. Each holds its texts and
    #: vectors in memory, some 50 KiB for a single text. A thousand clients who ask at once all have a place.
    gateway_in_flight: int = 2048


def _setting(
    default: Any,
    help: str,  # noqa: A002  (argparse's and click's word)
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
    guarded: bool = False,
) -> Any:
    metadata = {"help": help, "unit": unit, "minimum": minimum, "maximum": maximum, "guarded": guarded}
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be configured. Durations are seconds, sizes are bytes."""

    redis_url: str = _setting(
        "",
        "the URL of Redis: redis://, rediss://, unix:// or redis+sentinel://. Empty: a private one (`embedctl run`)",
        secret=True,
        guarded=True,
    )
    redis_password_file: str = _setting(
        "", "a file with the password of the user in `redis_url`; the URL must then contain no password", guarded=True
    )
    sentinel_password_file: str = _setting(
        "", "for redis+sentinel://: a file with the password of the sentinels. Empty: they ask for none", guarded=True
    )
    tls_ca_file: str = _setting(
        "",
        "for rediss://, and for https:// in `url`: a PEM file with the CA certificates that sign the other side's "
        "certificate. Empty: the system's CAs",
        guarded=True,
    )
    insecure: bool = _setting(
        False,
        "for rediss://: skip all checks of the certificate; anyone on the network path can then read and change "
        "everything",
        guarded=True,
    )
    url: str = _setting(
        "",
        "the URL of a gateway, https:// or http://: jobs are submitted and read there, in place of Redis. Empty: Redis",
        guarded=True,
    )
    api_key_file: str = _setting("", "a file with the key for the gateway of `url`. Empty: none", guarded=True)
    model: str = _setting("all-MiniLM-L6-v2", "the default model of jobs and workers")
    hardware: str = _setting("auto", "the default hardware class of jobs; auto: the fastest class with live workers")
    tenant: str = _setting(
        DEFAULT, "who new jobs belong to; tenants that wait for the same workers take turns, by their weights"
    )
    chunk_size: int = _setting(
        512,
        "maximum records in a chunk. It has fewer if they are about two seconds' work of a live worker",
        unit="records",
        minimum=1,
        maximum=MAX_CHUNK_RECORDS,
    )
    chunk_bytes: int = _setting(
        512 * 1024, "maximum text in a chunk, kept fields included", unit="bytes", minimum=1024, maximum=MAX_CHUNK_BYTES
    )
    max_text_bytes: int = _setting(
        1024 * 1024, "maximum text of one record", unit="bytes", minimum=1, maximum=MAX_CHUNK_BYTES
    )
    cache_max_bytes: int = _setting(
        16 * 1024**3,
        "the largest size of the file of `--cache`; the oldest vectors make room for new ones",
        unit="bytes",
        minimum=1024 * 1024,
    )
    chunk_files: str = _setting(
        "",
        "where new jobs keep the bytes of chunks: a folder that all machines share, or s3://BUCKET/PREFIX; Redis then "
        "holds only facts. Empty: in Redis",
        guarded=True,
    )
    interactive_share: float = _setting(
        0.5,
        "the part of a queue's work that the lane interactive has at most while the lane normal waits too",
        unit="(a share)",
        minimum=0.01,
        maximum=0.99,
    )
    ttl_s: float = _setting(
        7 * 24 * 3600.0,
        "a job is kept this long after its end; until then, it is kept at least 7 days after its last progress",
        unit="seconds",
        minimum=1,
        maximum=MAX_TTL_S,
    )
    lease_s: float = _setting(
        15.0, "a worker that is silent for this long loses its chunk", unit="seconds", minimum=0.5
    )
    hang_s: float = _setting(
        120.0, "an encode without progress for this long ends the worker", unit="seconds", minimum=1
    )
    state_dir: str = _setting(
        "", "where the private Redis keeps its data. Empty: the user's state folder", guarded=True
    )
    cache_dir: str = _setting(
        "", "where workers keep what they build for a model and a machine. Empty: the user's cache folder", guarded=True
    )
    log_format: str = _setting(
        "auto", "the format of workers' logs: text, json, or auto (text on a terminal, json elsewhere)"
    )
    metrics_address: str = _setting(
        "",
        "where a worker serves metrics and health; each further one of `embedctl up` has the next port. Empty: nowhere",
        unit="HOST:PORT",
        guarded=True,
    )
    flower_address: str = _setting(
        "127.0.0.1:5555",
        "where the dashboard listens; any except a loopback address needs `flower_auth_file`",
        unit="HOST:PORT",
        guarded=True,
    )
    flower_auth_file: str = _setting(
        "",
        "a file with lines `user:password`: the users who may see the dashboard. Empty: everyone on its machine",
        guarded=True,
    )
    flower_url_prefix: str = _setting("", "the dashboard's path behind a reverse proxy")
    gateway_address: str = _setting(
        "127.0.0.1:8080",
        "where the gateway listens; any except a loopback address needs `gateway_keys_file`",
        unit="HOST:PORT",
        guarded=True,
    )
    gateway_keys_file: str = _setting(
        "",
        "the file of the gateway's keys, which `embedctl gateway key add` writes. Empty: no keys, and everyone on its "
        "machine may call",
        guarded=True,
    )
    gateway_tls_cert_file: str = _setting(
        "", "a PEM file with the gateway's certificate and its chain. Empty: no TLS", guarded=True
    )
    gateway_tls_key_file: str = _setting(
        "", "a PEM file with the key of that certificate. Empty: it is in the same file", guarded=True
    )
    gateway_webhook_url: str = _setting(
        "",
        "where the gateway tells that a batch has ended, as Standard Webhooks does. Empty: it tells nobody",
        guarded=True,
    )
    gateway_webhook_networks: str = _setting(
        "",
        "the networks, such as 10.1.0.0/16, with commas, where that URL may lead, then also with http://. Empty: to "
        "public addresses alone, over https://",
        guarded=True,
    )
    gateway_webhook_secret_file: str = _setting(
        "",
        "a file with the secret that signs what is told, `whsec_` and then 24 to 64 bytes in base64",
        guarded=True,
    )
    gateway_timeout_s: float = _setting(
        60.0, "a request to the gateway that is not answered by then fails", unit="seconds", minimum=0.1, maximum=600
    )
    qdrant_api_key: str = _setting(
        "",
        "the API key of the Qdrant server that -o names; the variable QDRANT_API_KEY is read too. Empty: none",
        secret=True,
        guarded=True,
    )
    classes: Mapping[str, HardwareClass] = field(
        default_factory=lambda: SHIPPED_CLASSES, metadata={"help": "hardware classes: tables `[classes.NAME]`"}
    )
    models: Mapping[str, ModelEntry] = field(
        default_factory=dict, metadata={"help": "where models come from: tables `[models.NAME]`"}
    )
    tenants: Mapping[str, TenantEntry] = field(
        default_factory=dict, metadata={"help": "the shares and limits of tenants: tables `[tenants.NAME]`"}
    )

    #: What no source decides.
    limits: Limits = field(default_factory=Limits)

    def hardware_class(self, name: str) -> HardwareClass:
        """The hardware class with this name; raises SettingsError, which lists those that exist, if there is none."""
        try:
            return self.classes[name]
        except KeyError:
            raise SettingsError(
                f"there is no hardware class {name!r}{suggestion(name, self.classes)} Known: "
                f"{', '.join(sorted(self.classes))}. Add your own as [classes.{name}] in embedctl.toml."
            ) from None

    def replace(self, **changes: Any) -> Settings:
        """These settings with some changed, validated again."""
        changed = dataclasses.replace(self, **changes)
        if problems := changed.problems():
            raise SettingsError("\n".join(problems))
        return changed

    def problems(self) -> list[str]:
        """A message for each setting with a value that it may not have."""
        problems = _out_of_bounds(self)
        if self.redis_url and not _is_redis_url(self.redis_url):
            # The value is not shown: it may hold a password.
            problems.append("redis_url: can't be read; use redis://, rediss://, unix:// or redis+sentinel://")
        if self.url and (_may_hold_a_secret(self.url) or not is_web_url(self.url)):
            problems.append("url: write https:// or http:// and a host, without a user, a password or a query")
        if self.url and self.redis_url:
            problems.append(
                "url: jobs are in the gateway of `url` or in the Redis of `redis_url`, and both are set: leave one out"
            )
        if _may_hold_a_secret(self.chunk_files):
            problems.append(
                "chunk_files: a user, a password or a query would be shown in messages. Give SCHEME://BUCKET/PREFIX "
                "alone, and the credentials as the package for that scheme finds them, such as in AWS_ACCESS_KEY_ID"
            )
        problems += _wrong_addresses(self)
        if self.log_format not in _LOG_FORMATS:
            problems.append(f"log_format: {self.log_format!r} is none of {', '.join(_LOG_FORMATS)}")
        if not NAME_CHARACTERS.issuperset(self.flower_url_prefix):
            problems.append(f"flower_url_prefix: {self.flower_url_prefix!r}: use letters, digits and . _ - / @")
        if wrong := check_model_name(self.model):
            problems.append(f"model: {wrong}")
        if wrong := check_tenant(self.tenant):
            problems.append(f"tenant: {wrong}")
        problems += problems_of(self.tenants)
        if self.hardware != "auto" and self.hardware not in self.classes:
            problems.append(f"hardware: no class {self.hardware!r}{suggestion(self.hardware, self.classes)}")
        for name, entry in self.classes.items():
            problems += _class_problems(name, entry)
        problems += [f"models.{printable(name)}: {wrong}" for name in self.models if (wrong := check_model_name(name))]
        problems += [
            f"models.{printable(name)}.pooling: {entry.pooling!r} is none of {', '.join(POOLINGS)}"
            for name, entry in self.models.items()
            if entry.pooling not in ("", *POOLINGS)
        ]
        return problems


#: The settings by their names: what a source may decide.
SETTINGS: Mapping[str, dataclasses.Field[Any]] = {
    each.name: each for each in dataclasses.fields(Settings) if each.metadata
}


def check_model_name(name: str) -> str | None:
    """What is wrong with a model's name, or None. The name becomes part of a queue's name, so its alphabet is small."""
    if not name or len(name) > 200 or not NAME_CHARACTERS.issuperset(name):
        return f"model name {name!r}: use 1 to 200 characters, only letters, digits and . _ - / @"
    return None


def expanded(path: str, setting: str) -> Path:
    """A path that may begin with `~`; raises SettingsError, which names the setting, for a user without a home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SettingsError(
            f"{path}: user {os.getuid()} has no home folder, because HOME is not set and no account has that number: "
            f"set HOME, or set {setting} to a path that does not begin with ~"
        ) from None


def _out_of_bounds(settings: Settings) -> list[str]:
    problems = []
    for each in SETTINGS.values():
        minimum, value = each.metadata.get("minimum"), getattr(settings, each.name)
        if minimum is not None and not value >= minimum:
            problems.append(f"{each.name}: {value!r} is below its minimum of {minimum} {each.metadata['unit']}")
        elif minimum is not None and not math.isfinite(value):
            problems.append(f"{each.name}: {value!r} is not a finite number of {each.metadata['unit']}")
        elif (maximum := each.metadata.get("maximum")) is not None and value > maximum:
            problems.append(f"{each.name}: {value!r} is above its maximum of {maximum:.0f} {each.metadata['unit']}")
    return problems


def _wrong_addresses(settings: Settings) -> Iterator[str]:
    for name in ("metrics_address", "flower_address", "gateway_address"):
        if settings.metrics_address or name != "metrics_address":
            try:
                address_of(getattr(settings, name), name)
            except SettingsError as error:
                yield str(error)


def _may_hold_a_secret(url: str) -> bool:
    """Whether a URL has a place for a user's name, a password or a token."""
    _, mark, rest = url.partition("://")
    return bool(mark) and ("@" in rest.partition("/")[0] or "?" in rest)


def is_web_url(url: str) -> bool:
    """Whether a URL is one of HTTP, with a host, as it is sent, and holds no user."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (it raises if it is none)
    except ValueError:
        return False
    as_sent = url.isascii() and url.isprintable() and " " not in url
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc and as_sent


def _is_redis_url(url: str) -> bool:
    if url.lower().startswith(_OF_SENTINELS):  # their hosts are read elsewhere: `urlsplit` may refuse several
        return True
    try:
        return urlsplit(url).scheme in _SCHEMES
    except ValueError:
        return False


def _class_problems(name: str, entry: HardwareClass) -> list[str]:
    where = f"classes.{printable(name)}"
    problems = []
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii() or name == "auto":
        problems.append(f"{where}: a class's name consists of letters, digits, - and _, and is not 'auto'")
    for field_name, chosen, known in (("device", entry.device, DEVICES), ("precision", entry.precision, PRECISIONS)):
        if chosen not in known:
            problems.append(f"{where}.{field_name}: {chosen!r} is none of {', '.join(known)}")
    if entry.token_budget < 0:
        problems.append(f"{where}.token_budget: {entry.token_budget} is below 0")
    problems += [
        f"{where}.{bound}: {value} is not between {least} and {most}"
        for bound, value, least, most in (
            ("prefetch", entry.prefetch, 1, 16),
            # A Neuron core belongs to one process.
            ("workers_per_device", entry.workers_per_device, 0, 1 if entry.device == "neuron" else MOST_WORKERS),
            ("max_abs_error", entry.max_abs_error, 0, 2),
            ("min_cosine", entry.min_cosine, 0, 1),
            ("mean_cosine", entry.mean_cosine, 0, 1),
        )
        if not least <= value <= most
    ]
    problems += [f"{where}.models: {wrong}" for model in entry.models if (wrong := check_model_name(model))]
    return problems


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: a question about the known one nearest to it, or a full stop."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f". Did you mean {close[0]!r}?" if close else "."
