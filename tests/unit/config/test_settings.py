"""Settings: where they come from, which source wins, and every problem said at once."""

from __future__ import annotations

import dataclasses
import json
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embedctl.cli import main
from embedctl.local import state_folder
from embedctl_config.address import Address, address_of
from embedctl_config.errors import SettingsError
from embedctl_config.hardware import SHIPPED_CLASSES, HardwareClass, ModelEntry
from embedctl_config.loading import _GUARDED, _tell_foreign, load_settings, survey_settings
from embedctl_config.settings import SETTINGS, Settings, check_model_name
from embedctl_workers.models.cache import cache_folder


@dataclasses.dataclass
class Sources:
    """A home and a project folder of a test's own."""

    home: Path
    project: Path

    def user(self, text: str) -> Path:
        path = self.home / ".config" / "embedctl" / "config.toml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        return path

    def here(self, text: str) -> Path:
        path = self.project / "embedctl.toml"
        path.write_text(text)
        return path

    def load(self, environ: dict[str, str] | None = None, **explicit: Any) -> Settings:
        return load_settings({"HOME": str(self.home), **(environ or {})}, directory=self.project, **explicit)

    def problems(self, environ: dict[str, str] | None = None, **explicit: Any) -> list[str]:
        with pytest.raises(SettingsError) as raised:
            self.load(environ, **explicit)
        return str(raised.value).splitlines()


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    (tmp_path / "home").mkdir()
    (tmp_path / "project").mkdir()
    return Sources(tmp_path / "home", tmp_path / "project")


def test_the_defaults_are_valid(sources: Sources) -> None:
    assert sources.load() == Settings()
    assert Settings().replace() == Settings()


def test_every_setting_has_help_and_every_number_a_unit_and_a_minimum() -> None:
    for each in SETTINGS.values():
        assert each.metadata["help"], each.name
        if isinstance(each.default, int | float) and not isinstance(each.default, bool):
            assert each.metadata["unit"], each.name
            assert each.default >= each.metadata["minimum"], each.name


def test_the_stronger_source_wins(sources: Sources) -> None:
    sources.user("chunk_size = 1\nmax_text_bytes = 1\nlease_s = 1\nttl_s = 10\n")
    assert sources.load().chunk_size == 1
    sources.here("chunk_size = 2\nmax_text_bytes = 2\nlease_s = 2\n")
    assert sources.load().chunk_size == 2
    environ = {"EMBEDCTL_CHUNK_SIZE": "3", "EMBEDCTL_MAX_TEXT_BYTES": "3"}
    found = sources.load(environ, chunk_size=4)
    assert (found.chunk_size, found.max_text_bytes, found.lease_s, found.ttl_s) == (4, 3, 2.0, 10.0)


def test_none_as_an_argument_means_not_given(sources: Sources) -> None:
    assert sources.load({"EMBEDCTL_MODEL": "mine"}, model=None).model == "mine"


def test_numbers_keep_their_types(sources: Sources) -> None:
    sources.here("lease_s = 30\n")
    found = sources.load({"EMBEDCTL_CHUNK_SIZE": "7", "EMBEDCTL_TTL_S": "12.5"})
    assert (found.chunk_size, found.ttl_s, found.lease_s) == (7, 12.5, 30.0)
    assert isinstance(found.lease_s, float)


def test_the_xdg_folder_holds_the_users_file(sources: Sources, tmp_path: Path) -> None:
    sources.user("max_text_bytes = 5\n")
    path = tmp_path / "xdg" / "embedctl" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text("max_text_bytes = 6\n")
    assert sources.load().max_text_bytes == 5
    assert sources.load({"XDG_CONFIG_HOME": str(tmp_path / "xdg")}).max_text_bytes == 6


def test_a_named_file_stands_for_the_projects(sources: Sources, tmp_path: Path) -> None:
    sources.user("max_text_bytes = 4\nchunk_size = 4\n")
    sources.here("max_text_bytes = 5\nlease_s = 5\n")
    named = tmp_path / "other.toml"
    named.write_text("max_text_bytes = 6\n")
    found = sources.load({"EMBEDCTL_CONFIG": str(named)})
    assert (found.max_text_bytes, found.chunk_size, found.lease_s) == (6, 4, 15.0)


def test_a_named_file_that_is_missing_is_a_problem(sources: Sources, tmp_path: Path) -> None:
    (problem,) = sources.problems({"EMBEDCTL_CONFIG": str(tmp_path / "gone.toml")})
    assert str(tmp_path / "gone.toml") in problem
    assert "can't be read" in problem


@pytest.mark.parametrize(
    "content", [b"max_text_bytes = ", b"\xff\xfe", b"[classes\n", b"max_text_bytes = 1\nmax_text_bytes = 2\n"]
)
def test_a_file_that_cannot_be_read_is_named(sources: Sources, content: bytes) -> None:
    path = sources.here("")
    path.write_bytes(content)
    (problem,) = sources.problems()
    assert problem.startswith(f"{path}: can't be read")


def test_every_problem_is_listed_with_its_source(sources: Sources) -> None:
    path = sources.here('chunk_siz = 5\nmax_text_bytes = "many"\nmodel = 3\n[classes.cpu]\nbackand = "torch"\n')
    problems = sources.problems({"EMBEDCTL_TTL": "5", "EMBEDCTL_LEASE_S": "soon"})
    assert len(problems) == 6
    text = "\n".join(problems)
    assert f"{path}: chunk_siz: no such setting. Did you mean 'chunk_size'?" in text
    assert f"{path}: max_text_bytes: 'many' is not a whole number" in text
    assert f"{path}: model: text is expected, not int" in text
    assert f"{path}: classes.cpu.backand: no such key. Did you mean 'backend'?" in text
    assert "EMBEDCTL_TTL: no such setting. Did you mean 'ttl_s'?" in text
    assert "EMBEDCTL_LEASE_S: 'soon' is not a number" in text


def test_every_value_out_of_bounds_is_listed(sources: Sources) -> None:
    problems = sources.problems({"EMBEDCTL_CHUNK_SIZE": "0", "EMBEDCTL_LEASE_S": "0.1"}, ttl_s=0.0, max_text_bytes=-1)
    assert [problem.split(":")[0] for problem in problems] == ["chunk_size", "max_text_bytes", "ttl_s", "lease_s"]
    assert "0 is below its minimum of 1 records" in problems[0]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_durations_are_finite(sources: Sources, value: str) -> None:
    (problem,) = sources.problems({"EMBEDCTL_LEASE_S": value})
    assert "lease_s" in problem.lower()


@pytest.mark.parametrize("line", ["chunk_size = 1.5", "chunk_size = true", "lease_s = true", "max_text_bytes = [8]"])
def test_numbers_in_files_are_numbers_of_the_right_kind(sources: Sources, line: str) -> None:
    sources.here(line)
    (problem,) = sources.problems()
    assert line.split()[0] in problem


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    _tell_foreign.cache_clear()
    return caplog


def test_a_variable_that_resembles_nothing_is_left_alone(sources: Sources, told: pytest.LogCaptureFixture) -> None:
    assert sources.load({"EMBEDCTL_QQQQ": "1"}) == Settings()
    assert "EMBEDCTL_QQQQ" in told.text


def test_a_misspelt_flag_is_told_from_a_foreign_variable(sources: Sources) -> None:
    (problem,) = sources.problems({"EMBEDCTL_TEXT_FEILD": "body"})
    assert problem == "EMBEDCTL_TEXT_FEILD: no such setting. Did you mean 'text_field'?"


#: What Kubernetes tells every container of a namespace of its services embedctl, embedctl-redis and embedctl-metrics.
KUBERNETES = {
    f"{service}_{name}": value
    for service in ("EMBEDCTL", "EMBEDCTL_REDIS", "EMBEDCTL_METRICS", "EMBEDCTL_FLOWER")
    for name, value in {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "6379",
        "SERVICE_PORT_REDIS": "6379",
        "PORT": "tcp://10.0.0.1:6379",
        "PORT_6379_TCP": "tcp://10.0.0.1:6379",
        "PORT_6379_TCP_PROTO": "tcp",
        "PORT_6379_TCP_PORT": "6379",
        "PORT_6379_TCP_ADDR": "10.0.0.1",
    }.items()
}


def test_the_variables_of_kubernetes_stop_nothing(sources: Sources, told: pytest.LogCaptureFixture) -> None:
    found = sources.load({**KUBERNETES, "EMBEDCTL_CHUNK_SIZE": "9"})
    assert found == Settings(chunk_size=9)
    assert sources.load(KUBERNETES) == Settings()
    assert len(told.records) == 1, "it is told once"
    assert all(variable in told.text for variable in KUBERNETES)


def test_a_port_that_is_a_number_is_a_misspelt_setting(sources: Sources) -> None:
    problems = sources.problems({"EMBEDCTL_METRICS_PORT": "9105", "EMBEDCTL_GATEWAY_PORT": "8081"})
    assert problems[0] == "EMBEDCTL_METRICS_PORT: no such setting. Did you mean 'metrics_address'?"
    assert problems[1].startswith("EMBEDCTL_GATEWAY_PORT: no such setting. Did you mean ")


ADDRESSES = pytest.mark.parametrize("name", ["metrics_address", "flower_address", "gateway_address"])


@ADDRESSES
@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:8080", "127.0.0.1", 8080),
        ("gateway_1.example:0", "gateway_1.example", 0),
        ("[::1]:65535", "::1", 65535),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("9105", "127.0.0.1", 9105),
        ("0", "127.0.0.1", 0),
    ],
)
def test_an_address_is_a_host_and_a_port(sources: Sources, name: str, text: str, host: str, port: int) -> None:
    found = getattr(sources.load({f"EMBEDCTL_{name.upper()}": text}), name)
    address = address_of(found, name)
    assert address == (host, port)
    assert Address.parse(str(address)) == address


@ADDRESSES
@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1",
        "localhost",
        "localhost:",
        ":8080",
        "::1",
        "::1:8080",
        "[::1]",
        "[::1]8080",
        "[127.0.0.1]:8080",
        "127.0.0.1:65536",
        "127.0.0.1:-1",
        "127.0.0.1:http",
        "127.0.0.1:٨٠",
        "٨٠",
        "-1",
        "70000",
        "http://127.0.0.1:8080",
        "127.0.0.1:8080/",
        "me@127.0.0.1:8080",
        "127.0.0.1: 8080",
        "127.0.0.1:8080\n",
    ],
)
def test_a_wrong_address_is_told_with_the_right_form(sources: Sources, name: str, text: str) -> None:
    said = f"{name}: {text!r} is no address to listen at: use HOST:PORT, such as 0.0.0.0:8080 or [::1]:8080"
    explicit: dict[str, Any] = {name: text}
    for problems in (sources.problems({f"EMBEDCTL_{name.upper()}": text}), sources.problems(None, **explicit)):
        assert problems[0].startswith(said)


def test_only_metrics_may_be_served_nowhere(sources: Sources) -> None:
    problems = sources.problems(metrics_address="", flower_address="", gateway_address="")
    assert [problem.split(":")[0] for problem in problems] == ["flower_address", "gateway_address"]


def test_the_variables_of_kubernetes_stop_no_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable, value in {**KUBERNETES, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(variable, value)
    served: list[Settings] = []
    monkeypatch.setattr("embedctl.dashboard.serve.serve", lambda settings, _: served.append(settings))
    main(["flower"], standalone_mode=False)
    assert served[0].flower_address == "127.0.0.1:5555"


# What a file that was merely found may not decide

GUARDED = {
    "redis_url": '"redis://attacker.example"',
    "redis_password_file": '"/etc/passwd"',
    "sentinel_password_file": '"/etc/passwd"',
    "tls_ca_file": '"theirs.crt"',
    "insecure": "true",
    "chunk_files": '"s3://attackers"',
    "state_dir": '"state"',
    "cache_dir": '"cache"',
    "metrics_address": '"0.0.0.0:1"',
    "flower_address": '"0.0.0.0:1"',
    "flower_auth_file": '"theirs"',
    "gateway_address": '"0.0.0.0:1"',
    "gateway_keys_file": '"theirs"',
    "gateway_webhook_url": '"https://attacker.example"',
    "gateway_webhook_secret_file": '"theirs"',
    "gateway_tls_cert_file": '"theirs.pem"',
    "gateway_tls_key_file": '"theirs.pem"',
    "qdrant_api_key": '"theirs"',
}


def test_every_setting_was_judged_and_nothing_that_names_a_place_is_left_open() -> None:
    assert {name for name, guarded in _GUARDED.items() if guarded} == set(GUARDED)
    for name in set(_GUARDED) - set(GUARDED):
        assert not name.endswith(("_file", "_dir", "_url", "_address")), name


@pytest.mark.parametrize("name", GUARDED)
def test_a_file_that_was_merely_found_decides_nothing_dangerous(sources: Sources, name: str) -> None:
    path = sources.here(f"{name} = {GUARDED[name]}\n")
    (problem,) = sources.problems()
    assert problem.startswith(f"{path}: {name}: ")
    assert f"EMBEDCTL_CONFIG={path}" in problem
    sources.load({"EMBEDCTL_CONFIG": str(path)})


def test_the_users_own_file_may_decide_all_of_it(sources: Sources) -> None:
    sources.user("".join(f"{name} = {value}\n" for name, value in GUARDED.items()))
    assert sources.load().redis_url == "redis://attacker.example"


def test_what_a_stronger_source_decides_is_not_the_files_any_more(sources: Sources) -> None:
    sources.here('redis_url = "redis://project"\nchunk_size = 9\n')
    found = sources.load({"EMBEDCTL_REDIS_URL": "redis://mine"})
    assert (found.redis_url, found.chunk_size) == ("redis://mine", 9)
    assert sources.load(redis_url="redis://mine").redis_url == "redis://mine"


def test_a_found_file_may_not_take_the_password_elsewhere(sources: Sources) -> None:
    sources.user('redis_url = "rediss://worker@production"\nredis_password_file = "secret"\n')
    sources.here('redis_url = "redis://attacker.example"\n')
    (problem,) = sources.problems()
    assert "attacker" not in problem
    assert "redis_url: not allowed" in problem


PASSWORDS = pytest.mark.parametrize("name", ["redis_password_file", "sentinel_password_file"])


@PASSWORDS
def test_a_password_goes_with_the_url_that_it_stood_beside(sources: Sources, tmp_path: Path, name: str) -> None:
    user = sources.user(f'redis_url = "rediss://worker@production"\n{name} = "secret"\n')
    assert getattr(sources.load(), name) == "secret"
    named = tmp_path / "other.toml"
    named.write_text('redis_url = "redis://other"\n')
    for environ in ({"EMBEDCTL_CONFIG": str(named)}, {"EMBEDCTL_REDIS_URL": "redis://other"}):
        environ["HOME"] = str(sources.home)
        found, words, _ = survey_settings(environ, directory=sources.project)
        assert (found.redis_url, getattr(found, name)) == ("redis://other", "")
        assert words[name] == f"default; that of {user} belongs to the redis_url there"
    assert getattr(sources.load(redis_url="redis://other"), name) == ""


@PASSWORDS
def test_a_password_is_not_joined_with_the_url_of_another_source(sources: Sources, name: str) -> None:
    user = sources.user(f'{name} = "secret"\n')
    (problem,) = sources.problems({"EMBEDCTL_REDIS_URL": "redis://other"})
    assert f"{name} comes from {user}, and redis_url from EMBEDCTL_REDIS_URL, which is stronger" in problem
    variable = f"EMBEDCTL_{name.upper()}"
    assert sources.load({"EMBEDCTL_REDIS_URL": "redis://other", variable: ""}).redis_url
    both = {"EMBEDCTL_REDIS_URL": "redis://other", variable: "own"}
    assert getattr(sources.load(both), name) == "own"


def test_each_password_is_judged_alone(sources: Sources) -> None:
    user = sources.user('redis_password_file = "master"\nsentinel_password_file = "sentinels"\n')
    problems = sources.problems({"EMBEDCTL_REDIS_URL": "redis://other"})
    assert [problem.partition(" comes from ")[0] for problem in problems] == [
        "redis_password_file",
        "sentinel_password_file",
    ]
    assert all(str(user) in problem for problem in problems)


def test_the_url_may_be_in_a_file_and_the_password_in_the_environment(sources: Sources, tmp_path: Path) -> None:
    """As with a ConfigMap and a Secret."""
    named = tmp_path / "config.toml"
    named.write_text('redis_url = "rediss://worker@production"\n')
    secret = {"EMBEDCTL_REDIS_PASSWORD_FILE": "/run/secrets/redis"}
    found = sources.load({"EMBEDCTL_CONFIG": str(named), **secret})
    assert (found.redis_url, found.redis_password_file) == ("rediss://worker@production", "/run/secrets/redis")
    sources.user('redis_url = "rediss://worker@mine"\n')
    found = sources.load(secret)
    assert (found.redis_url, found.redis_password_file) == ("rediss://worker@mine", "/run/secrets/redis")
    named.write_text('redis_password_file = "named"\n')
    found = sources.load({"EMBEDCTL_CONFIG": str(named)})
    assert (found.redis_url, found.redis_password_file) == ("rediss://worker@mine", "named")
    found = sources.load({"EMBEDCTL_CONFIG": str(named), "EMBEDCTL_REDIS_URL": "redis://localhost"})
    assert (found.redis_url, found.redis_password_file) == ("redis://localhost", "")


def test_a_password_that_was_given_for_a_weaker_url_stays_with_it(sources: Sources) -> None:
    user = sources.user('redis_url = "rediss://worker@production"\n')
    environ = {"HOME": str(sources.home), "EMBEDCTL_REDIS_PASSWORD_FILE": "secret"}
    found, words, _ = survey_settings(environ, directory=sources.project, redis_url="redis://localhost")
    assert (found.redis_url, found.redis_password_file) == ("redis://localhost", "")
    assert words["redis_password_file"].endswith(f"EMBEDCTL_REDIS_PASSWORD_FILE belongs to the redis_url of {user}")


def test_a_found_files_url_takes_no_password_and_no_password_away(sources: Sources) -> None:
    sources.here('redis_url = "redis://attacker.example"\n')
    environ = {"HOME": str(sources.home), "EMBEDCTL_REDIS_PASSWORD_FILE": "secret"}
    settings, _, problems = survey_settings(environ, directory=sources.project)
    assert (settings.redis_url, len(problems)) == ("", 1)
    sources.user('redis_url = "rediss://production"\nredis_password_file = "mine"\n')
    settings, words, problems = survey_settings({"HOME": str(sources.home)}, directory=sources.project)
    assert (settings.redis_url, settings.redis_password_file, len(problems)) == ("rediss://production", "mine", 1)
    assert words["redis_url"].endswith(f"config.toml; that of {sources.project / 'embedctl.toml'} is not taken")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            'redis_url = "redis://attacker.example"\n',
            "redis_url: not allowed in a file that was found in the working directory",
        ),
        ("max_text_bytes = -1\n", "max_text_bytes: -1 is below its minimum"),
        ("max_text_byte = 3\n", "max_text_byte: no such setting"),
        ("= 3", "can't be read"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_what_is_wrong_is_shown_beside_the_settings(
    sources: Sources,
    text: str,
    problem: str,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sources.here(text)
    monkeypatch.setenv("HOME", str(sources.home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(sources.project)
    with pytest.raises(SystemExit, match="2"):
        main(["config", "show", *options], standalone_mode=False)
    shown, told = capsys.readouterr()
    assert problem in told
    assert "attacker" not in shown
    names = json.loads(shown) if options else {line.split()[0] for line in shown.splitlines()}
    assert {"redis_url", "max_text_bytes", "ttl_s"} <= set(names)


@pytest.mark.parametrize(
    ("variable", "url", "problem"),
    [
        ("REDIS_URL", "me:hunter2@host", "redis_url: can't be read"),
        ("CHUNK_FILES", "s3://me:hunter2@bucket/chunks", "chunk_files: a user, a password or a query would be shown"),
        (
            "CHUNK_FILES",
            "https://host/chunks?token=hunter2",
            "chunk_files: a user, a password or a query would be shown",
        ),
    ],
)
def test_a_url_that_is_refused_is_not_shown(
    variable: str,
    url: str,
    problem: str,
    sources: Sources,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(sources.home))
    monkeypatch.setenv(f"EMBEDCTL_{variable}", url)
    monkeypatch.chdir(sources.project)
    with pytest.raises(SystemExit, match="2"):
        main(["config", "show"], standalone_mode=False)
    shown, told = capsys.readouterr()
    assert problem in told
    assert "hunter2" not in shown + told


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a number without an account, in a container."""

    def no_account(_: object) -> None:
        raise KeyError

    for variable in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_account)


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_does_without_a_file_of_their_own(tmp_path: Path) -> None:
    assert load_settings({}, directory=tmp_path) == Settings()


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize(("place", "setting"), [(cache_folder, "cache_dir"), (state_folder, "state_dir")])
def test_a_user_without_a_home_is_told_what_to_set(
    place: Callable[[Settings], Path], setting: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=f"no home folder.*set HOME, or set {setting} to a path"):
        place(Settings())
    assert place(Settings().replace(**{setting: str(tmp_path)})) == tmp_path


def test_one_key_of_a_shipped_class_can_be_changed(sources: Sources) -> None:
    sources.here("[classes.cpu]\ntoken_budget = 4096\n")
    found = sources.load().classes
    assert found["cpu"] == dataclasses.replace(SHIPPED_CLASSES["cpu"], token_budget=4096)
    assert set(found) == set(SHIPPED_CLASSES)
    assert SHIPPED_CLASSES["cpu"].token_budget != 4096


def test_a_class_can_be_added(sources: Sources) -> None:
    sources.here('[classes.big-cpu]\nprefetch = 3\nmodels = ["a/b", "c"]\noptions = {dim = 5}\nbackend = "dummy"\n')
    found = sources.load({"EMBEDCTL_HARDWARE": "big-cpu"})
    assert found.hardware_class("big-cpu") == HardwareClass(
        backend="dummy", prefetch=3, models=("a/b", "c"), options={"dim": 5}
    )
    assert found.hardware_class("cpu") == SHIPPED_CLASSES["cpu"]


def test_the_projects_classes_and_models_stand_on_the_users(sources: Sources) -> None:
    sources.user('[classes.mine]\nprefetch = 5\ntoken_budget = 7\n[models.m]\nsource = "a"\nrevision = "r"\n')
    sources.here('[classes.mine]\nprefetch = 6\n[models.m]\nsource = "b"\n[models.n]\nsource = "c"\n')
    found = sources.load()
    assert found.classes["mine"] == HardwareClass(prefetch=6, token_budget=7)
    assert found.models == {"m": ModelEntry("b", "r"), "n": ModelEntry("c")}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[classes.cpu]\nprefetch = "2"\n', "classes.cpu.prefetch: '2' is not of the right type"),
        ("[classes.cpu]\nprefetch = 2.0\n", "classes.cpu.prefetch: 2.0 is not of the right type"),
        ("[classes.cpu]\nprefetch = true\n", "classes.cpu.prefetch: True is not of the right type"),
        ('[classes.cpu]\nmodels = "m"\n', "classes.cpu.models: 'm' is not of the right type"),
        ("[classes.cpu]\nmodels = [1]\n", "classes.cpu.models: (1,) is not of the right type"),
        ("[classes.cpu]\noptions = 1\n", "classes.cpu.options: 1 is not of the right type"),
        ("[classes.cpu]\ntoken_budgets = 1\n", "no such key. Did you mean 'token_budget'?"),
        ('classes = "cpu"\n', "expected tables like [classes.cpu]"),
        ("[classes]\ncpu = 3\n", "expected tables like [classes.cpu]"),
        ("[models.m]\nsource = 1\n", "models.m.source: 1 is not of the right type"),
        ('[models.m]\nsauce = "x"\n', "models.m.sauce: no such key. Did you mean 'source'?"),
        ('[classes.cpu]\nprecision = "fp8"\n', "classes.cpu.precision: 'fp8' is none of fp32, fp16, int8"),
        ('[classes.cpu]\ndevice = "tpu"\n', "classes.cpu.device: 'tpu' is none of"),
        ("[classes.cpu]\nprefetch = 17\n", "classes.cpu.prefetch: 17 is not between 1 and 16"),
        ("[classes.cpu]\ntoken_budget = -1\n", "classes.cpu.token_budget: -1 is below 0"),
        ("[classes.gpu]\nworkers_per_device = 65\n", "classes.gpu.workers_per_device: 65 is not between 0 and 64"),
        ("[classes.neuron]\nworkers_per_device = 2\n", "workers_per_device: 2 is not between 0 and 1"),
        ("[classes.cpu]\nmin_cosine = 1.5\n", "classes.cpu.min_cosine: 1.5 is not between 0 and 1"),
        ("[classes.cpu]\nmax_abs_error = nan\n", "classes.cpu.max_abs_error: nan is not between 0 and 2"),
        ('[classes.cpu]\nmodels = ["a b"]\n', "classes.cpu.models: model name 'a b'"),
        ("[classes.auto]\nprefetch = 2\n", "and is not 'auto'"),
        ('[classes."a.b"]\nprefetch = 2\n', "classes.a.b: a class's name consists of letters"),
        ('[models."a b"]\nsource = "x"\n', "models.a b: model name 'a b'"),
    ],
)
def test_wrong_tables_are_refused_by_name(sources: Sources, text: str, expected: str) -> None:
    sources.here(text)
    (problem,) = sources.problems()
    assert expected in problem


def test_a_hardware_class_that_does_not_exist_is_a_problem(sources: Sources) -> None:
    (problem,) = sources.problems({"EMBEDCTL_HARDWARE": "cpuu"})
    assert "no class 'cpuu'. Did you mean 'cpu'?" in problem
    with pytest.raises(SettingsError, match=r"no hardware class 'gpux'.*Known: .*cpu.*\[classes\.gpux\]"):
        Settings().hardware_class("gpux")


@pytest.mark.parametrize("url", ["http://host", "host:6379", "localhost", "memory://"])
def test_a_url_that_is_no_redis_lists_the_schemes(sources: Sources, url: str) -> None:
    (problem,) = sources.problems({"EMBEDCTL_REDIS_URL": url})
    assert "use redis://, rediss://, unix:// or redis+sentinel://" in problem


@pytest.mark.parametrize("url", ["redis://h", "rediss://u:p@h:1/2?ssl_cert_reqs=none", "unix:///a/b.sock?db=1"])
def test_redis_urls_are_taken_as_they_are(sources: Sources, url: str) -> None:
    assert sources.load(redis_url=url).redis_url == url


@pytest.mark.parametrize(
    "url", ["http://user:hunter2@host", "user:hunter2@host:6379", ":hunter2@host", "redis://:hunter2@[::1"]
)
def test_a_bad_url_is_refused_without_its_password(sources: Sources, url: str) -> None:
    text = "\n".join(sources.problems({"EMBEDCTL_REDIS_URL": url}))
    assert "redis_url" in text.lower()
    assert "hunter2" not in text


@pytest.mark.parametrize("value", ['["redis://:hunter2@host"]', '{main = "redis://:hunter2@host"}'])
def test_a_url_of_the_wrong_type_is_refused_without_its_password(sources: Sources, value: str) -> None:
    sources.here(f"redis_url = {value}\n")
    text = "\n".join(sources.problems())
    assert "redis_url" in text
    assert "hunter2" not in text


def test_replace_validates_again() -> None:
    assert Settings().replace(max_text_bytes=3).max_text_bytes == 3
    with pytest.raises(SettingsError, match="max_text_bytes"):
        Settings().replace(max_text_bytes=-1)


@pytest.mark.parametrize("name", ["all-MiniLM-L6-v2", "a/b.c_d@e", "x" * 200])
def test_model_names_that_may_be_part_of_a_queues_name(name: str) -> None:
    assert check_model_name(name) is None


@pytest.mark.parametrize("name", ["", "a b", "x" * 201, "é", "a,b", "a*", "a\n"])
def test_model_names_that_may_not(name: str) -> None:
    assert "use 1 to 200 characters, only letters" in str(check_model_name(name))
    with pytest.raises(SettingsError, match="model"):
        Settings().replace(model=name)


READS = """
import os, sys
read = []
get = type(os.environ).__getitem__
def noting(self, key):
    if str(key).startswith("EMBEDCTL_"):
        read.append(key)
    return get(self, key)
type(os.environ).__getitem__ = noting
import embedctl, embedctl.cli, embedctl_config.celery_app
import embedctl_workers.commands.worker, embedctl_workers.serving.lifecycle
assert embedctl.Settings().redis_url == "", embedctl.Settings()
assert read == [], read
try:
    embedctl.load_settings()
except embedctl.SettingsError as error:
    assert "EMBEDCTL_MAX_TEXT_BYTES" in str(error)
else:
    raise AssertionError("the environment of this test does not reach the process")
"""


def test_importing_reads_nothing_from_the_environment(tmp_path: Path) -> None:
    environ = {"EMBEDCTL_REDIS_URL": "nonsense", "EMBEDCTL_CONFIG": "/nonexistent", "EMBEDCTL_MAX_TEXT_BYTES": "x"}
    done = subprocess.run(
        [sys.executable, "-c", READS],
        env={**environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
