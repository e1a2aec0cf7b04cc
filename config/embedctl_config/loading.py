"""Reads the settings from all their sources.

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
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedctl_config.cpu import LEVEL_VARIABLE
from embedctl_config.errors import SettingsError
from embedctl_config.hardware import SHIPPED_CLASSES, HardwareClass, ModelEntry
from embedctl_config.printable import printable
from embedctl_config.settings import ENV_PREFIX, SETTINGS, Settings, suggestion
from embedctl_config.tenants import TenantEntry

log = logging.getLogger(__name__)

CONFIG_VARIABLE = "EMBEDCTL_CONFIG"
#: Variables of ours that are neither settings nor flags.
_OTHERS = (CONFIG_VARIABLE, LEVEL_VARIABLE)
#: Flags of the command line that are not settings but have a variable. A test compares them with the commands.
FLAGS = frozenset(
    """
    allow_pickle cache cpus dialect dims dims_anyway drain dry_run dtype duplicates
    exporter force format fresh gateway gpu gpu_workers http id_field if_missing json keep lane limit log_level
    long max_errors may neuron_core no_build no_clobber normalize output passwords peers
    per pooling precision price prompt pull quick quiet ranges ready records redis_7 resume skip_bad_lines sync
    target template text_field threads timeout tokens vectors wait watch
    """.split()  # noqa: SIM905  (a list would fill a screen)
)
#: The names that Kubernetes gives to a service's variables, and the beginning of the value of one that ends in _PORT.
_SERVICE = re.compile(
    r"EMBEDCTL(_\w+?)??_(?P<what>SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
#: Every setting, and whether an `embedctl.toml` that was merely found may not decide it.
_GUARDED: Mapping[str, bool] = {name: each.metadata.get("guarded", False) for name, each in SETTINGS.items()}
#: The settings that are tables of tables: what each of these is, and those that exist without any source.
_TABLES: Mapping[str, tuple[type[Any], Mapping[str, Any]]] = {
    "classes": (HardwareClass, SHIPPED_CLASSES),
    "models": (ModelEntry, {}),
    "tenants": (TenantEntry, {}),
}
#: The values that click accepts.
_BOOLEANS: Mapping[object, bool] = {
    **dict.fromkeys((True, "true", "1", "yes", "on"), True),
    **dict.fromkeys((False, "false", "0", "no", "off"), False),
}


def load_settings(
    environ: Mapping[str, str] | None = None, *, directory: Path | None = None, **explicit: Any
) -> Settings:
    """Read the settings from all their sources.

    Args:
        environ: environment variables; those of the process if None.
        directory: the folder to search for `embedctl.toml`; the working directory if None.
        explicit: settings that override every source; None means not given.

    Raises:
        SettingsError: something is wrong; the message lists every problem with its source.
    """
    settings, _, problems = survey_settings(environ, directory=directory, **explicit)
    if problems:
        raise SettingsError("\n".join(problems))
    return settings


def survey_settings(
    environ: Mapping[str, str] | None = None, *, directory: Path | None = None, **explicit: Any
) -> tuple[Settings, Mapping[str, str], list[str]]:
    """The settings for display only, the source of each of them in words, and every problem.

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
    return settings, layers.in_words(), problems or settings.problems()


@dataclass(frozen=True, slots=True)
class _Source:
    """A source of settings: a file, which may have been merely `found`, or another program's variable."""

    file: Path = Path()
    found: bool = False
    variable: str = ""

    def words(self, name: str) -> str:
        if self is _ARGUMENTS:
            return "argument"
        if self.variable:
            return self.variable
        return ENV_PREFIX + name.upper() if self is _ENVIRONMENT else str(self.file)


_ENVIRONMENT, _ARGUMENTS = _Source(), _Source()
#: Qdrant's own variable, which its users have set already.
_QDRANT = _Source(variable="QDRANT_API_KEY")
#: The settings that name passwords → the setting whose hosts they are for, and what these are.
_PASSWORDS: Mapping[str, tuple[str, str]] = {
    "redis_password_file": ("redis_url", "Redis"),
    "sentinel_password_file": ("redis_url", "Redis"),
    "api_key_file": ("url", "gateway"),
}


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
        for name, (url, _) in _PASSWORDS.items():
            if url in layer and url in self._refused and not source.found:
                self._refused.pop(name, None)  # it belonged to the refused URL
            if url in layer and name in self._sources and url in self._sources and self._goes_with_url(name):
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
            for name, (url, _) in _PASSWORDS.items()
            if self.values.get(name) and self.values.get(url) and not self._goes_with_url(name)
        ]

    def in_words(self) -> dict[str, str]:
        """The source of each setting, in words."""
        words = {name: self._sources[name].words(name) if name in self._sources else "default" for name in SETTINGS}
        words.update({name: why for name, why in self._left_out.items() if name not in self._sources})
        return words | {
            name: f"{words[name]}; that of {source.file} is not taken" for name, source in self._refused.items()
        }

    def _goes_with_url(self, name: str) -> bool:
        """Whether the password's source is the URL's or a stronger one, and so was chosen with the URL in view."""
        return self._ranks[name] >= self._ranks[_PASSWORDS[name][0]]

    def _leave_out(self, name: str) -> None:
        """Drop a password: it belongs to the host that it was given for, and a stronger source names another."""
        of, _ = _PASSWORDS[name]
        url, password = (self._sources[each].words(each) for each in (of, name))
        where = "there" if url == password else f"of {url}"
        self._left_out[name] = f"default; that of {password} belongs to the {of} {where}"
        del self.values[name], self._sources[name], self._ranks[name]

    def _went_elsewhere(self, name: str) -> str:
        """The message about a password that came from a weaker source than the URL."""
        of, what = _PASSWORDS[name]
        url, password = self._sources[of], self._sources[name]
        never = f"A password is never sent to a {what} that a stronger source names"
        if url is _ARGUMENTS:
            return f"{name} comes from {password.words(name)}, and {of} is an argument. {never}: give both as arguments"
        return (
            f"{name} comes from {password.words(name)}, and {of} from {url.words(of)}, which is stronger. "
            f"{never}: set the password file in the same place as the URL, or as {ENV_PREFIX}{name.upper()}"
        )


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


def _from_file(path: Path, below: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        problems.append(f"{path}: can't be read: {error}")
        return {}
    values: dict[str, Any] = {}
    for name, value in table.items():
        where = f"{path}: {printable(name)}"
        if name in _TABLES:
            form, shipped = _TABLES[name]
            known = below.get(name, shipped)
            values[name] = {**known, **_entries(value, form, known, where, problems)}
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
            problems += [f"{place}.{printable(key)}: no such key{suggestion(key, fields)}" for key in sorted(unknown)]
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
        if not variable.startswith(ENV_PREFIX) or variable in _OTHERS or name in FLAGS:
            continue
        if _is_foreign(variable, value):
            foreign.append(variable)
        elif name in _GUARDED:
            _take(values, name, value, variable, problems)
        else:
            problems.append(f"{variable}: no such setting{suggestion(name, [*_GUARDED, *FLAGS])}")
    if foreign:
        _tell_foreign(", ".join(sorted(foreign)))
    return values


def _is_foreign(variable: str, value: str) -> bool:
    """Whether a variable with our prefix was not meant for us.

    Kubernetes sets variables for each service of a namespace in all its containers: for a service called
    `embedctl-metrics`, EMBEDCTL_METRICS_PORT is `tcp://10.0.0.1:9105`. Any other variable that is not a setting counts
    as a misspelt one only if it resembles a setting's name.
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
    scalars: dict[str, Any] = {name: each for name, each in SETTINGS.items() if name not in _TABLES}
    if name not in scalars:
        problems.append(f"{where}: no such setting{suggestion(name, [*scalars, *_TABLES])}")
        return
    try:
        values[name] = _parsed(value, scalars[name].default)
    except ValueError as wrong:
        problems.append(f"{where}: {wrong}")


def _parsed(value: object, default: object) -> object:
    """A value in the type of its setting's default; raises ValueError, which says what is wrong."""
    if isinstance(default, bool):
        word = value.lower() if isinstance(value, str) else value
        if isinstance(word, str | int) and word in _BOOLEANS:
            return _BOOLEANS[word]
        raise ValueError(f"{value!r} is neither true nor false")
    if isinstance(default, str):
        if isinstance(value, str):
            return value
        raise ValueError(f"text is expected, not {type(value).__name__}")
    form = int if isinstance(default, int) else float
    if isinstance(value, (str, int, form)) and not isinstance(value, bool):
        with suppress(ValueError):
            return form(value)
    raise ValueError(f"{value!r} is not a {'whole ' if form is int else ''}number")
