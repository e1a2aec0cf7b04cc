"""The settings of producers and workers: read once, validated as a whole, passed in.

Sources, the strongest first: explicit arguments, `EMBEDCTL_*` variables, the project's file (`EMBEDCTL_CONFIG`, else
`embedctl.toml` in the working directory), the user's file (`$XDG_CONFIG_HOME/embedctl/config.toml`), defaults.

An `embedctl.toml` that nobody named may have come with a cloned repository. So it must not decide which passwords are
read, which machines are contacted, which files are written or which code is run: such settings are *guarded*. And a
password is never sent to a Redis that a stronger source names, because that Redis may belong to someone else.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import math
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from embedctl_config.errors import SettingsError
from embedctl_config.hardware import DEVICES, MOST_WORKERS, PRECISIONS, SHIPPED_CLASSES, HardwareClass, ModelEntry
from embedctl_config.printable import printable
from embedctl_config.tenants import DEFAULT, TenantEntry, check_tenant, problems_of

log = logging.getLogger(__name__)

ENV_PREFIX = "EMBEDCTL_"
CONFIG_VARIABLE = "EMBEDCTL_CONFIG"
#: Flags of the command line that are not settings but have a variable. A test compares them with the commands.
FLAGS = frozenset(
    """
    allow_mixed allow_pickle cache cache_precision cpus delete_missing digests dimensions drain dry_run exporter
    force format fresh gateway gpu gpu_workers http id id_field idempotency_key if_missing json keep lane limit
    log_level max_errors neuron_core no_build no_clobber normalize on_duplicate_id one_file output output_type
    passwords peers precision price prompt prompt_name pull quick quiet ranges ready redis_7 report resume since
    skip_bad_lines target text_field threads timeout to truncation truncation_side unique_ids wait watch
    """.split()  # noqa: SIM905  (a list would fill a screen)
)
#: The longest time that a job may be kept (seconds): ten years. None of our clocks and counters overflows by then.
MAX_TTL_S = 10 * 365 * 24 * 3600.0
#: Most records in a chunk. A value in Redis holds at most 512 MiB, so vectors of more than 7,168 dimensions need chunks
#: of fewer records.
MAX_CHUNK_RECORDS = 16_384
#: Most text in a chunk, and so in a record (bytes). Text and ids together stay below a fifth of those 512 MiB.
MAX_CHUNK_BYTES = 64 * 1024 * 1024
#: The message if a Redis is needed and `redis_url` is empty.
NO_REDIS = "no Redis is configured: set EMBEDCTL_REDIS_URL, or use `embedctl run`, which starts one"
#: The names that Kubernetes gives to a service's variables, and the beginning of the value of one that ends in _PORT.
_SERVICE = re.compile(
    r"EMBEDCTL(_\w+?)??_(?P<what>SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
_SCHEMES = ("redis", "rediss", "unix")
_OF_SENTINELS = ("redis+sentinel:", "rediss+sentinel:")
LAST_PORT = 65535
#: The most that a chunk may have to stay in Redis with `data_url` (bytes).
MAX_INLINE_BYTES = 1024 * 1024
#: The settings that are tables of tables.
_TABLES = ("classes", "models", "tenants")
_LOG_FORMATS = ("auto", "text", "json")
#: The values that click accepts.
_BOOLEANS: Mapping[object, bool] = {
    **dict.fromkeys((True, "true", "1", "yes", "on"), True),
    **dict.fromkeys((False, "false", "0", "no", "off"), False),
}
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/@")


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
        "for rediss://: a PEM file with the CA certificates that sign Redis' certificate. Empty: the system's CAs",
        guarded=True,
    )
    insecure: bool = _setting(
        False,
        "for rediss://: skip all checks of the certificate; anyone on the network path can then read and change "
        "everything",
        guarded=True,
    )
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
    high_water_bytes: int = _setting(
        256 * 1024 * 1024,
        "a producer pauses while its job has more text than this waiting for workers",
        unit="bytes",
        minimum=1024,
    )
    results_high_water_bytes: int = _setting(
        0,
        "a job that is drained pauses while Redis holds more of its results than this. 0: a quarter of Redis' "
        "maxmemory, or 1 GiB if that is not set",
        unit="bytes",
        minimum=0,
    )
    part_records: int = _setting(
        100_000, "about how many records a part of a drained job holds", unit="records", minimum=1
    )
    cache_max_bytes: int = _setting(
        16 * 1024**3,
        "the largest size of the file of `--cache`; the oldest vectors make room for new ones",
        unit="bytes",
        minimum=1024 * 1024,
    )
    data_url: str = _setting(
        "",
        "where new jobs keep the bytes of chunks: a folder that all machines share, or s3://BUCKET/PREFIX; Redis then "
        "holds only facts. Empty: in Redis",
        guarded=True,
    )
    data_inline_bytes: int = _setting(
        4096,
        "a chunk that is no larger stays in Redis even with `data_url`",
        unit="bytes",
        minimum=0,
        maximum=MAX_INLINE_BYTES,
    )
    window: int = _setting(8, "maximum tickets of one job in its queue at once", unit="tickets", minimum=1)
    window_per_worker: int = _setting(
        4, "the same limit per live worker; the larger of the two applies", unit="tickets", minimum=1
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
    reissue_s: float = _setting(
        60.0, "a ticket that nobody takes is sent again after this long", unit="seconds", minimum=0.5
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
    metrics_host: str = _setting("127.0.0.1", "the address for a worker's metrics and health", guarded=True)
    metrics_port: int = _setting(
        0,
        "the port for metrics and health; each further worker of `embedctl up` uses the next port. 0: neither",
        unit="port",
        minimum=0,
        maximum=LAST_PORT,
    )
    flower_address: str = _setting(
        "127.0.0.1",
        "the address of the dashboard; any except a loopback address needs `flower_auth_file`",
        guarded=True,
    )
    flower_port: int = _setting(
        5555, "the port of the dashboard. 0: any free port", unit="port", minimum=0, maximum=LAST_PORT
    )
    flower_auth_file: str = _setting(
        "",
        "a file with lines `user:password`: the users who may see the dashboard. Empty: everyone on its machine",
        guarded=True,
    )
    flower_url_prefix: str = _setting("", "the dashboard's path behind a reverse proxy")
    gateway_address: str = _setting(
        "127.0.0.1",
        "the address of the gateway; any except a loopback address needs `gateway_keys_file`",
        guarded=True,
    )
    gateway_port: int = _setting(
        8080, "the port of the gateway. 0: any free port", unit="port", minimum=0, maximum=LAST_PORT
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
    gateway_webhook_secret_file: str = _setting(
        "",
        "a file with the secret that signs what is told, `whsec_` and then 24 to 64 bytes in base64",
        guarded=True,
    )
    gateway_in_flight: int = _setting(
        256,
        "maximum requests that the gateway answers at once; it asks callers of more to come again",
        unit="requests",
        minimum=1,
        maximum=4096,
    )
    gateway_timeout_s: float = _setting(
        60.0, "a request to the gateway that is not answered by then fails", unit="seconds", minimum=0.1, maximum=600
    )
    qdrant_api_key: str = _setting(
        "",
        "the API key of the Qdrant server that --to names; the variable QDRANT_API_KEY is read too. Empty: none",
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

    def hardware_class(self, name: str) -> HardwareClass:
        """The hardware class with this name.

        Raises:
            SettingsError: there is none; the message lists those that exist.
        """
        try:
            return self.classes[name]
        except KeyError:
            raise SettingsError(
                f"there is no hardware class {name!r}{_did_you_mean(name, self.classes)} Known: "
                f"{', '.join(sorted(self.classes))}. Add your own as [classes.{name}] in embedctl.toml."
            ) from None

    def replace(self, **changes: Any) -> Settings:
        """These settings with some changed, validated again."""
        changed = dataclasses.replace(self, **changes)
        _raise_all(_problems(changed))
        return changed


def load_settings(
    environ: Mapping[str, str] | None = None, *, directory: Path | None = None, **explicit: Any
) -> Settings:
    """Read the settings from all their sources; see :func:`explain_settings`."""
    return explain_settings(environ, directory=directory, **explicit)[0]


def explain_settings(
    environ: Mapping[str, str] | None = None, *, directory: Path | None = None, **explicit: Any
) -> tuple[Settings, Mapping[str, str]]:
    """Read the settings from all their sources.

    Args:
        environ: environment variables; those of the process if None.
        directory: the folder to search for `embedctl.toml`; the working directory if None.
        explicit: settings that override every source; None means not given.

    Returns:
        The settings, and the source of each of them in words.

    Raises:
        SettingsError: something is wrong; the message lists every problem with its source.
    """
    settings, words, problems = survey_settings(environ, directory=directory, **explicit)
    _raise_all(problems)
    return settings, words


def survey_settings(
    environ: Mapping[str, str] | None = None, *, directory: Path | None = None, **explicit: Any
) -> tuple[Settings, Mapping[str, str], list[str]]:
    """What :func:`explain_settings` returns, and every problem. Use the settings for display only.

    A setting with an unusable value takes the value of the next weaker source. A value out of bounds stays.
    """
    environ = os.environ if environ is None else environ
    problems: list[str] = []
    layers = _Layers()
    for source in _config_files(environ, directory or Path.cwd()):
        layers.lay(source, _from_file(source.file, layers.values, problems))
    if key := environ.get(_QDRANT.variable):
        layers.lay(_QDRANT, {"qdrant_api_key": key})
    layers.lay(_ENVIRONMENT, _from_environment(environ, problems))
    layers.lay(_ARGUMENTS, {name: value for name, value in explicit.items() if value is not None})
    problems += layers.problems()
    settings = Settings(**layers.values)
    # Problems of a source may be the reason why values look wrong.
    return settings, layers.in_words(), problems or _problems(settings)


@dataclass(frozen=True, slots=True)
class _Source:
    """A source of settings.

    Attributes:
        found: whether it is a file that nobody named and that was merely found in the working directory.
        variable: another program's variable, which is read too.
    """

    file: Path = Path()
    found: bool = False
    variable: str = ""

    def words(self, name: str) -> str:
        """The source of this setting, in words."""
        if self is _ARGUMENTS:
            return "argument"
        if self.variable:
            return self.variable
        return ENV_PREFIX + name.upper() if self is _ENVIRONMENT else str(self.file)


_ENVIRONMENT, _ARGUMENTS = _Source(), _Source()
#: Qdrant's own variable, which its users have set already.
_QDRANT = _Source(variable="QDRANT_API_KEY")
_URL = "redis_url"
#: The settings that name passwords for the hosts of `redis_url`.
_PASSWORDS = ("redis_password_file", "sentinel_password_file")


class _Layers:
    """Settings from several sources, laid over each other, the weakest first."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._sources: dict[str, _Source] = {}
        self._ranks: dict[str, int] = {}  # by setting, the rank of its source: a higher rank is stronger
        self._laid = 0
        self._refused: dict[str, _Source] = {}
        self._left_out: dict[str, str] = {}  # by the setting of a password, why it is not taken

    def lay(self, source: _Source, layer: Mapping[str, Any]) -> None:
        """Add a source. It overrides the sources before it, except for settings that it may not decide."""
        self._laid += 1
        if source.found:
            self._refused = {name: source for name in layer if _GUARDED[name]}
            layer = {name: value for name, value in layer.items() if name not in self._refused}
        elif _URL in layer and _URL in self._refused:
            for name in _PASSWORDS:  # they belonged to the refused URL
                self._refused.pop(name, None)
        if _URL in layer and _URL in self._sources:
            for name in _PASSWORDS:
                if name in self._sources and self._goes_with_url(name):
                    self._leave_out(name)
        self._refused = {name: refused for name, refused in self._refused.items() if name not in layer or source.found}
        self.values.update(layer)
        self._sources.update(dict.fromkeys(layer, source))
        self._ranks.update(dict.fromkeys(layer, self._laid))

    def problems(self) -> list[str]:
        """A message for each setting that its source may not decide."""
        problems = [
            f"{source.file}: {name}: not allowed in a file that was found in the working directory, because the "
            "file may be someone else's. If it is yours, set "
            f"{CONFIG_VARIABLE}={shlex.quote(str(source.file))}, or move the setting to your own file "
            f"(~/.config/embedctl/config.toml) or to {ENV_PREFIX}{name.upper()}"
            for name, source in self._refused.items()
        ]
        return problems or [
            self._went_elsewhere(name)
            for name in _PASSWORDS
            if self.values.get(name) and self.values.get(_URL) and not self._goes_with_url(name)
        ]

    def in_words(self) -> dict[str, str]:
        """The source of each setting, in words."""
        words = {each.name: _words(self._sources.get(each.name), each.name) for each in dataclasses.fields(Settings)}
        words.update({name: why for name, why in self._left_out.items() if name not in self._sources})
        return words | {
            name: f"{words[name]}; that of {source.file} is not taken" for name, source in self._refused.items()
        }

    def _goes_with_url(self, name: str) -> bool:
        """Whether the password's source is the URL's or a stronger one, and so was chosen with the URL in view."""
        return self._ranks[name] >= self._ranks[_URL]

    def _leave_out(self, name: str) -> None:
        """Drop a password: it belongs to the Redis that it was given for, and a stronger source names another."""
        url, password = (self._sources[each].words(each) for each in (_URL, name))
        where = "there" if url == password else f"of {url}"
        self._left_out[name] = f"default; that of {password} belongs to the redis_url {where}"
        del self.values[name], self._sources[name], self._ranks[name]

    def _went_elsewhere(self, name: str) -> str:
        """The message about a password that came from a weaker source than the URL."""
        url, password = self._sources[_URL], self._sources[name]
        never = "A password is never sent to a Redis that a stronger source names"
        if url is _ARGUMENTS:
            return (
                f"{name} comes from {password.words(name)}, and redis_url is an argument. {never}: give both as "
                "arguments"
            )
        return (
            f"{name} comes from {password.words(name)}, and redis_url from {url.words(_URL)}, which is stronger. "
            f"{never}: set the password file in the same place as the URL, or as {ENV_PREFIX}{name.upper()}"
        )


def _words(source: _Source | None, name: str) -> str:
    return "default" if source is None else source.words(name)


#: Every setting, and whether an `embedctl.toml` that was merely found may not decide it.
_GUARDED: Mapping[str, bool] = {each.name: each.metadata.get("guarded", False) for each in dataclasses.fields(Settings)}


def check_model_name(name: str) -> str | None:
    """What is wrong with a model's name, or None. The name becomes part of a queue's name, so its alphabet is small."""
    if not name or len(name) > 200 or not _NAME_CHARACTERS.issuperset(name):
        return f"model name {name!r}: use 1 to 200 characters, only letters, digits and . _ - / @"
    return None


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise SettingsError("\n".join(problems))


def _config_files(environ: Mapping[str, str], directory: Path) -> Iterable[_Source]:
    user = _users_file(environ)
    if user is not None and user.is_file():
        yield _Source(user)
    named = environ.get(CONFIG_VARIABLE)
    project = Path(named) if named else directory / "embedctl.toml"
    if named or project.is_file():
        yield _Source(project, found=not named)


def _users_file(environ: Mapping[str, str]) -> Path | None:
    """The path of the user's file; None for a user without a home, such as a container's user without an account."""
    try:
        home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".config"
    except RuntimeError:
        return None
    return Path(home) / "embedctl" / "config.toml"


def expanded(path: str, setting: str) -> Path:
    """A path that may begin with `~`.

    Args:
        setting: the setting that holds the path or could hold another one, for the message.

    Raises:
        SettingsError: the path begins with `~`, and this user has no home.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SettingsError(
            f"{path}: user {os.getuid()} has no home folder, because HOME is not set and no account has that number: "
            f"set HOME, or set {setting} to a path that does not begin with ~"
        ) from None


def _from_file(path: Path, below: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        problems.append(f"{path}: can't be read: {error}")
        return {}
    values: dict[str, Any] = {}
    for name, value in table.items():
        where = f"{path}: {printable(name)}"
        if name == "classes":
            shipped = below.get("classes", SHIPPED_CLASSES)
            values["classes"] = {
                **shipped,
                **_entries(value, HardwareClass, shipped, where, problems),
            }
        elif name == "models":
            known = below.get("models", {})
            values["models"] = {**known, **_entries(value, ModelEntry, known, where, problems)}
        elif name == "tenants":
            known = below.get("tenants", {})
            values["tenants"] = {**known, **_entries(value, TenantEntry, known, where, problems)}
        else:
            _take(values, name, value, where, problems)
    return values


def _entries(table: Any, form: type[Any], below: Mapping[str, Any], where: str, problems: list[str]) -> dict[str, Any]:
    """The named entries of one table; an entry that a weaker source has too is changed, not replaced."""
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        problems.append(f"{where}: expected tables like [classes.cpu] or [models.NAME]")
        return {}
    entries = {}
    fields = {each.name: each for each in dataclasses.fields(form)}
    for name, entry in table.items():
        place = f"{where}.{printable(name)}"
        if unknown := set(entry) - set(fields):
            problems += [
                f"{place}.{printable(key)}: no such key{_did_you_mean(key, fields)}" for key in sorted(unknown)
            ]
            continue
        defaults = below.get(name, form())
        given = {key: _as_type(value, getattr(defaults, key)) for key, value in entry.items()}
        wrong = [
            f"{place}.{key}: {value!r} is not of the right type"
            for key, value in given.items()
            if not _same_type(value, getattr(defaults, key))
        ]
        problems += wrong
        if not wrong:
            entries[name] = dataclasses.replace(defaults, **given)
    return entries


def _as_type(value: object, default: object) -> object:
    """A list as a tuple, and a whole number as a float if a float is expected; anything else unchanged."""
    if isinstance(value, list):
        return tuple(value)
    return float(value) if type(value) is int and type(default) is float else value


def _same_type(value: object, default: object) -> bool:
    if isinstance(default, tuple):
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if isinstance(default, Mapping):
        return isinstance(value, Mapping)
    return type(value) is type(default)


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    foreign = []
    for variable, value in environ.items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE or name in FLAGS:
            continue
        if is_foreign(variable, value):
            foreign.append(variable)
        elif name in _GUARDED:
            _take(values, name, value, variable, problems)
        else:
            problems.append(f"{variable}: no such setting{_did_you_mean(name, [*_GUARDED, *FLAGS])}")
    if foreign:
        _tell_foreign(", ".join(sorted(foreign)))
    return values


def is_foreign(variable: str, value: str) -> bool:
    """Whether a variable with our prefix was not meant for us.

    Kubernetes sets variables for each service of a namespace in all its containers: for a service called
    `embedctl-metrics`, EMBEDCTL_METRICS_PORT is `tcp://10.0.0.1:9105`. A variable that is not a setting counts as a
    misspelt one only if it resembles a setting's name.
    """
    service = _SERVICE.fullmatch(variable)
    if service and (service["what"] != "PORT" or _ADDRESS.match(value)):
        return True
    name = variable.removeprefix(ENV_PREFIX).lower()
    return name not in _GUARDED and not difflib.get_close_matches(name, [*_GUARDED, *FLAGS], n=1)


@functools.cache
def _tell_foreign(variables: str) -> None:
    """Log them, once in a process."""
    log.warning("ignored, because they are not settings of embedctl: %s", variables)


def _take(values: dict[str, Any], name: str, value: Any, where: str, problems: list[str]) -> None:
    scalars: dict[str, Any] = {each.name: each for each in dataclasses.fields(Settings) if each.name not in _TABLES}
    if name not in scalars:
        problems.append(f"{where}: no such setting{_did_you_mean(name, [*scalars, *_TABLES])}")
        return
    default = scalars[name].default
    if isinstance(default, bool):
        word = value.lower() if isinstance(value, str) else value
        chosen = _BOOLEANS.get(word) if isinstance(word, str | int) else None
        if chosen is None:
            problems.append(f"{where}: {value!r} is neither true nor false")
        else:
            values[name] = chosen
        return
    if isinstance(default, str):
        if isinstance(value, str):
            values[name] = value
        else:
            problems.append(f"{where}: text is expected, not {type(value).__name__}")
        return
    whole = isinstance(default, int)
    allowed = (str, int) if whole else (str, int, float)
    try:
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ValueError  # noqa: TRY004, TRY301  (one message for a value of the wrong type and for text that is not a number)
        values[name] = type(default)(value)
    except ValueError:
        problems.append(f"{where}: {value!r} is not a {'whole ' if whole else ''}number")


def _problems(settings: Settings) -> list[str]:
    problems = []
    for each in dataclasses.fields(Settings):
        minimum, value = each.metadata.get("minimum"), getattr(settings, each.name)
        if minimum is not None and not value >= minimum:
            problems.append(f"{each.name}: {value!r} is below its minimum of {minimum} {each.metadata['unit']}")
        elif minimum is not None and not math.isfinite(value):
            problems.append(f"{each.name}: {value!r} is not a finite number of {each.metadata['unit']}")
        elif (maximum := each.metadata.get("maximum")) is not None and value > maximum:
            problems.append(f"{each.name}: {value!r} is above its maximum of {maximum:.0f} {each.metadata['unit']}")
    if settings.redis_url and not _is_redis_url(settings.redis_url):
        # The value is not shown: it may hold a password.
        problems.append("redis_url: can't be read; use redis://, rediss://, unix:// or redis+sentinel://")
    if _may_hold_a_secret(settings.data_url):
        problems.append(
            "data_url: a user, a password or a query would be shown in messages. Give SCHEME://BUCKET/PREFIX alone, "
            "and the credentials as the package for that scheme finds them, such as in AWS_ACCESS_KEY_ID"
        )
    if settings.log_format not in _LOG_FORMATS:
        problems.append(f"log_format: {settings.log_format!r} is none of {', '.join(_LOG_FORMATS)}")
    if not _NAME_CHARACTERS.issuperset(settings.flower_url_prefix):
        problems.append(f"flower_url_prefix: {settings.flower_url_prefix!r}: use letters, digits and . _ - / @")
    if wrong := check_model_name(settings.model):
        problems.append(f"model: {wrong}")
    if wrong := check_tenant(settings.tenant):
        problems.append(f"tenant: {wrong}")
    problems += problems_of(settings.tenants)
    if settings.hardware != "auto" and settings.hardware not in settings.classes:
        problems.append(f"hardware: no class {settings.hardware!r}{_did_you_mean(settings.hardware, settings.classes)}")
    for name, entry in settings.classes.items():
        problems += _class_problems(name, entry)
    problems += [f"models.{printable(name)}: {wrong}" for name in settings.models if (wrong := check_model_name(name))]
    return problems


def _may_hold_a_secret(url: str) -> bool:
    """Whether a URL has a place for a user's name, a password or a token."""
    _, mark, rest = url.partition("://")
    return bool(mark) and ("@" in rest.partition("/")[0] or "?" in rest)


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
    if entry.device not in DEVICES:
        problems.append(f"{where}.device: {entry.device!r} is none of {', '.join(DEVICES)}")
    if entry.precision not in PRECISIONS:
        problems.append(f"{where}.precision: {entry.precision!r} is none of {', '.join(PRECISIONS)}")
    if not 1 <= entry.prefetch <= 16:
        problems.append(f"{where}.prefetch: {entry.prefetch} is not between 1 and 16")
    if entry.token_budget < 0:
        problems.append(f"{where}.token_budget: {entry.token_budget} is below 0")
    most = 1 if entry.device == "neuron" else MOST_WORKERS  # a Neuron core belongs to one process
    if not 0 <= entry.workers_per_device <= most:
        problems.append(f"{where}.workers_per_device: {entry.workers_per_device} is not between 0 and {most}")
    problems += [
        f"{where}.{bound}: {value} is not between 0 and {most:g}"
        for bound, value, most in (
            ("max_abs_error", entry.max_abs_error, 2),
            ("min_cosine", entry.min_cosine, 1),
            ("mean_cosine", entry.mean_cosine, 1),
        )
        if not 0 <= value <= most
    ]
    problems += [f"{where}.models: {wrong}" for model in entry.models if (wrong := check_model_name(model))]
    return problems


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f". Did you mean {close[0]!r}?" if close else "."
