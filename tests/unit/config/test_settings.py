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
from embedctl.operating.local import state_folder
from embedctl_config.address import Address, address_of
from embedctl_config.errors import SettingsError
from embedctl_config.hardware import SHIPPED_CLASSES, HardwareClass, ModelEntry
from embedctl_config.loading import _GUARDED, _tell_foreign, load_settings, survey_settings
from embedctl_config.settings import SETTINGS, Settings, check_model_name
from embedctl_workers.models.cache import cache_folder


@dataclasses.dataclass
class Sources:
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


def test_every_setting_has_help_and_every_number_a_unit_and_a_minimum() -> None:
    for each in SETTINGS.values():
        assert each.metadata["help"], each.name
        if isinstance(each.default, int | float) and not isinstance(each.default, bool):
            assert each.metadata["unit"], each.name
            assert each.default >= each.metadata["minimum"], each.name


def test_the_stronger_source_wins(sources: Sources, tmp_path: Path) -> None:
    assert sources.load() == Settings()
    sources.user("chunk_size = 1\nmax_text_bytes = 1\nlease_s = 1\nttl_s = 10\n")
    sources.here("chunk_size = 2\nmax_text_bytes = 2\nlease_s = 2\n")
    environ = {"EMBEDCTL_CHUNK_SIZE": "3", "EMBEDCTL_MAX_TEXT_BYTES": "3"}
    found = sources.load(environ, chunk_size=4, max_text_bytes=None)
    assert (found.chunk_size, found.max_text_bytes, found.lease_s, found.ttl_s) == (4, 3, 2.0, 10.0)
    assert isinstance(found.lease_s, float)
    xdg = tmp_path / "embedctl" / "config.toml"
    xdg.parent.mkdir()
    xdg.write_text("ttl_s = 6\n")
    assert sources.load({"XDG_CONFIG_HOME": str(tmp_path)}).ttl_s == 6.0


def test_a_named_file_stands_for_the_projects(sources: Sources, tmp_path: Path) -> None:
    sources.user("max_text_bytes = 4\nchunk_size = 4\n")
    sources.here("max_text_bytes = 5\nlease_s = 5\n")
    named = tmp_path / "other.toml"
    named.write_text("max_text_bytes = 6\n")
    found = sources.load({"EMBEDCTL_CONFIG": str(named)})
    assert (found.max_text_bytes, found.chunk_size, found.lease_s) == (6, 4, 15.0)
    named.unlink()
    (problem,) = sources.problems({"EMBEDCTL_CONFIG": str(named)})
    assert problem.startswith(f"{named}: can't be read")


@pytest.mark.parametrize("content", [b"max_text_bytes = ", b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(sources: Sources, content: bytes) -> None:
    path = sources.here("")
    path.write_bytes(content)
    (problem,) = sources.problems()
    assert problem.startswith(f"{path}: can't be read")


def test_every_problem_is_listed_with_its_source(sources: Sources) -> None:
    path = sources.here('chunk_siz = 5\nmax_text_bytes = "many"\nmodel = 3\n[classes.cpu]\nbackand = "torch"\n')
    problems = sources.problems({"EMBEDCTL_TTL": "5", "EMBEDCTL_LEASE_S": "soon", "EMBEDCTL_TEXT_FEILD": "body"})
    assert len(problems) == 7
    text = "\n".join(problems)
    assert "EMBEDCTL_TEXT_FEILD: no such setting. Did you mean 'text_field'?" in text
    assert f"{path}: chunk_siz: no such setting. Did you mean 'chunk_size'?" in text
    assert f"{path}: max_text_bytes: 'many' is not a whole number" in text
    assert f"{path}: model: text is expected, not int" in text
    assert f"{path}: classes.cpu.backand: no such key. Did you mean 'backend'?" in text
    assert "EMBEDCTL_TTL: no such setting. Did you mean 'ttl_s'?" in text
    assert "EMBEDCTL_LEASE_S: 'soon' is not a number" in text


def test_every_value_out_of_bounds_is_listed(sources: Sources) -> None:
    problems = sources.problems({"EMBEDCTL_CHUNK_SIZE": "0", "EMBEDCTL_LEASE_S": "nan"}, ttl_s=0.0, max_text_bytes=-1)
    assert [problem.split(":")[0] for problem in problems] == ["chunk_size", "max_text_bytes", "ttl_s", "lease_s"]
    assert "0 is below its minimum of 1 records" in problems[0]


@pytest.mark.parametrize("line", ["chunk_size = 1.5", "chunk_size = true", "lease_s = true", "max_text_bytes = [8]"])
def test_numbers_in_files_are_numbers_of_the_right_kind(sources: Sources, line: str) -> None:
    sources.here(line)
    (problem,) = sources.problems()
    assert line.split()[0] in problem


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    _tell_foreign.cache_clear()
    return caplog


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
    assert len(told.records) == 1, "it is told once"
    assert all(variable in told.text for variable in KUBERNETES)


def test_a_port_that_is_a_number_is_a_misspelt_setting(sources: Sources) -> None:
    problems = sources.problems({"EMBEDCTL_METRICS_PORT": "9105", "EMBEDCTL_GATEWAY_PORT": "8081"})
    assert problems[0] == "EMBEDCTL_METRICS_PORT: no such setting. Did you mean 'metrics_address'?"
    assert problems[1].startswith("EMBEDCTL_GATEWAY_PORT: no such setting. Did you mean ")


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
def test_an_address_is_a_host_and_a_port(sources: Sources, text: str, host: str, port: int) -> None:
    found = sources.load({"EMBEDCTL_GATEWAY_ADDRESS": text})
    address = address_of(found.gateway_address, "gateway_address")
    assert address == (host, port)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "localhost",
        ":8080",
        "::1:8080",
        "[::1]8080",
        "[127.0.0.1]:8080",
        "127.0.0.1:65536",
        "127.0.0.1:٨٠",
        "70000",
        "http://127.0.0.1:8080",
        "127.0.0.1:8080/",
        "127.0.0.1:8080\n",
    ],
)
def test_a_wrong_address_is_told_with_the_right_form(sources: Sources, text: str) -> None:
    said = f"address: {text!r} is no address to listen at: use HOST:PORT, such as 0.0.0.0:8080 or [::1]:8080"
    problems = sources.problems(metrics_address=text, flower_address=text, gateway_address=text)
    assert [said in problem for problem in problems] == [True] * 3
    assert said in sources.problems({"EMBEDCTL_METRICS_ADDRESS": text})[0]


# What a file that was merely found may not decide

GUARDED = {
    "redis_url": '"redis://attacker.example"',
    "redis_password_file": '"/etc/passwd"',
    "sentinel_password_file": '"/etc/passwd"',
    "tls_ca_file": '"theirs.crt"',
    "insecure": "true",
    "url": '"https://attacker.example"',
    "api_key_file": '"/etc/passwd"',
    "chunk_files": '"s3://attackers"',
    "state_dir": '"state"',
    "cache_dir": '"cache"',
    "metrics_address": '"0.0.0.0:1"',
    "flower_address": '"0.0.0.0:1"',
    "flower_auth_file": '"theirs"',
    "gateway_address": '"0.0.0.0:1"',
    "gateway_keys_file": '"theirs"',
    "gateway_webhook_url": '"https://attacker.example"',
    "gateway_webhook_networks": '"0.0.0.0/0"',
    "gateway_webhook_secret_file": '"theirs"',
    "gateway_tls_cert_file": '"theirs.pem"',
    "gateway_tls_key_file": '"theirs.pem"',
    "qdrant_api_key": '"theirs"',
}


def test_every_setting_was_judged_and_nothing_that_names_a_place_is_left_open() -> None:
    assert {name for name, guarded in _GUARDED.items() if guarded} == set(GUARDED)
    for name in set(_GUARDED) - set(GUARDED):
        assert not name.endswith(("_file", "_dir", "_url", "_address")), name


def test_a_file_that_was_merely_found_decides_nothing_dangerous(sources: Sources) -> None:
    text = "".join(f"{name} = {value}\n" for name, value in GUARDED.items())
    path = sources.here(text)
    problems = sources.problems()
    assert sorted(problem.split(": ")[1] for problem in problems) == sorted(GUARDED)
    assert all(f"EMBEDCTL_CONFIG={path}" in problem and "attacker" not in problem for problem in problems)
    environ = {"EMBEDCTL_URL": ""}  # a gateway and Redis exclude each other
    assert sources.load({**environ, "EMBEDCTL_CONFIG": str(path)}).redis_url == "redis://attacker.example"
    path.unlink()
    sources.user(text)
    assert sources.load(environ).redis_url == "redis://attacker.example"
    with pytest.raises(SettingsError, match="both are set: leave one out"):
        sources.load()


def test_what_a_stronger_source_decides_is_not_the_files_any_more(sources: Sources) -> None:
    sources.here('redis_url = "redis://project"\nchunk_size = 9\n')
    found = sources.load({"EMBEDCTL_REDIS_URL": "redis://mine"})
    assert (found.redis_url, found.chunk_size) == ("redis://mine", 9)
    assert sources.load(redis_url="redis://mine").redis_url == "redis://mine"


#: What each source says of the URL and of the password, and which of both is taken.
PASSWORDS: list[tuple[dict[str, tuple[str, str]], tuple[str, str]]] = [
    ({"user": ("redis://a", "of a")}, ("redis://a", "of a")),
    # A password goes with the URL that it stood beside.
    ({"user": ("redis://a", "of a"), "named": ("redis://b", "")}, ("redis://b", "")),
    ({"user": ("redis://a", "of a"), "environ": ("redis://b", "")}, ("redis://b", "")),
    ({"user": ("redis://a", "of a"), "argument": ("redis://b", "")}, ("redis://b", "")),
    ({"user": ("redis://a", ""), "environ": ("", "of a"), "argument": ("redis://b", "")}, ("redis://b", "")),
    ({"user": ("redis://a", ""), "named": ("", "of a"), "environ": ("redis://b", "")}, ("redis://b", "")),
    # The URL may be in a file and the password in the environment, as with a ConfigMap and a Secret.
    ({"user": ("redis://a", ""), "environ": ("", "of a")}, ("redis://a", "of a")),
    ({"named": ("redis://a", ""), "environ": ("", "of a")}, ("redis://a", "of a")),
    ({"user": ("redis://a", ""), "named": ("", "of a")}, ("redis://a", "of a")),
    ({"user": ("", "of a"), "environ": ("redis://b", "of b")}, ("redis://b", "of b")),
    # A file that was merely found gets no password, and takes none away.
    ({"found": ("redis://theirs", ""), "environ": ("", "of a")}, ("", "of a")),
    ({"user": ("redis://a", "of a"), "found": ("redis://theirs", "")}, ("redis://a", "of a")),
]


@pytest.mark.parametrize(
    ("url", "name"),
    [("redis_url", "redis_password_file"), ("redis_url", "sentinel_password_file"), ("url", "api_key_file")],
)
@pytest.mark.parametrize(("said", "taken"), PASSWORDS)
def test_a_password_goes_to_no_url_but_its_own(
    sources: Sources, tmp_path: Path, url: str, name: str, said: dict[str, tuple[str, str]], taken: tuple[str, str]
) -> None:
    if url == "url":
        said = {source: (of.replace("redis:", "https:"), password) for source, (of, password) in said.items()}
        taken = taken[0].replace("redis:", "https:"), taken[1]
    environ = {"HOME": str(sources.home)}
    files = {"user": sources.user(""), "named": tmp_path / "named.toml", "found": sources.here("")}
    for source, values in said.items():
        of = {setting: value for setting, value in zip((url, name), values, strict=True) if value}
        if source in files:
            files[source].write_text("".join(f'{setting} = "{value}"\n' for setting, value in of.items()))
        elif source == "environ":
            environ |= {f"EMBEDCTL_{setting.upper()}": value for setting, value in of.items()}
    if "named" in said:
        environ["EMBEDCTL_CONFIG"] = str(files["named"])
    argument = {url: said["argument"][0]} if "argument" in said else {}
    settings, words, problems = survey_settings(environ, directory=sources.project, **argument)
    assert (getattr(settings, url), getattr(settings, name)) == taken
    assert len(problems) == ("found" in said)
    assert (f"belongs to the {url}" in words[name]) is (taken[1] == "")


def test_a_password_is_not_joined_with_the_url_of_another_source(sources: Sources) -> None:
    user = sources.user('redis_password_file = "master"\nsentinel_password_file = "sentinels"\n')
    problems = sources.problems({"EMBEDCTL_REDIS_URL": "redis://other"})
    for name, problem in zip(("redis_password_file", "sentinel_password_file"), problems, strict=True):
        assert f"{name} comes from {user}, and redis_url from EMBEDCTL_REDIS_URL, which is stronger" in problem
    none = {"EMBEDCTL_REDIS_PASSWORD_FILE": "", "EMBEDCTL_SENTINEL_PASSWORD_FILE": ""}
    assert sources.load({"EMBEDCTL_REDIS_URL": "redis://other", **none}).redis_url == "redis://other"


@pytest.fixture
def config_show(
    sources: Sources, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """Runs `embedctl config show` where something is wrong; returns what it prints and what it says of that."""

    def run(*options: str, **variables: str) -> tuple[str, str]:
        for name, value in {"HOME": str(sources.home), **variables}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
        monkeypatch.chdir(sources.project)
        with pytest.raises(SystemExit, match="2"):
            main(["config", "show", *options], standalone_mode=False)
        shown, told = capsys.readouterr()
        assert "attacker" not in shown
        return shown, told

    return run


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('redis_url = "redis://attacker.example"\n', "redis_url: not allowed in a file that was found in the working"),
        ("max_text_byte = 3\n", "max_text_byte: no such setting"),
        ("= 3", "can't be read"),
    ],
)
def test_what_is_wrong_is_shown_beside_the_settings(
    sources: Sources, config_show: Callable[..., tuple[str, str]], text: str, problem: str
) -> None:
    sources.here(text)
    for options in ([], ["--json"]):
        shown, told = config_show(*options)
        assert problem in told
        names = json.loads(shown) if options else {line.split()[0] for line in shown.splitlines()}
        assert {"redis_url", "max_text_bytes", "ttl_s"} <= set(names)


@pytest.mark.parametrize(
    ("variable", "url", "problem"),
    [
        ("REDIS_URL", "me:hunter2@host", "redis_url: can't be read"),
        ("CHUNK_FILES", "s3://me:hunter2@bucket/chunks", "chunk_files: a user, a password or a query would be shown"),
    ],
)
def test_a_url_that_is_refused_is_not_shown(
    config_show: Callable[..., tuple[str, str]], variable: str, url: str, problem: str
) -> None:
    shown, told = config_show(**{f"EMBEDCTL_{variable}": url})
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
def test_without_a_home_it_says_what_to_set(place: Callable[[Settings], Path], setting: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"no home folder.*set HOME, or set {setting} to a path"):
        place(Settings())
    assert place(Settings().replace(**{setting: str(tmp_path)})) == tmp_path


def test_the_projects_classes_and_models_stand_on_the_users(sources: Sources) -> None:
    sources.user('[classes.mine]\nprefetch = 5\noptions = {dim = 5}\n[models.m]\nsource = "a"\nrevision = "r"\n')
    sources.here('[classes.mine]\nprefetch = 6\nmodels = ["a/b"]\n[models.m]\nsource = "b"\n[models.n]\nsource = "c"\n')
    found = sources.load({"EMBEDCTL_HARDWARE": "mine"})
    assert found.hardware_class("mine") == HardwareClass(prefetch=6, models=("a/b",), options={"dim": 5})
    assert found.hardware_class("cpu") == SHIPPED_CLASSES["cpu"]
    assert found.models == {"m": ModelEntry("b", "r"), "n": ModelEntry("c")}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[classes.cpu]\nprefetch = "2"\n', "classes.cpu.prefetch: '2' is not of the right type"),
        ("[classes.cpu]\nprefetch = true\n", "classes.cpu.prefetch: True is not of the right type"),
        ("[classes.cpu]\nmodels = [1]\n", "classes.cpu.models: (1,) is not of the right type"),
        ("[classes.cpu]\noptions = 1\n", "classes.cpu.options: 1 is not of the right type"),
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


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("'http://user:hunter2@host'", "use redis://, rediss://, unix:// or redis+sentinel://"),
        ("'user:hunter2@host:6379'", "redis_url"),
        ("'redis://:hunter2@[::1'", "redis_url"),
        ("['redis://:hunter2@host']", "redis_url"),
    ],
)
def test_a_bad_url_is_refused_without_its_password(sources: Sources, value: str, says: str) -> None:
    (problem,) = sources.problems({"EMBEDCTL_CONFIG": str(sources.here(f"redis_url = {value}\n"))})
    assert says in problem
    assert "hunter2" not in problem


@pytest.mark.parametrize("name", ["", "a b", "x" * 201, "é", "a*", "a\n"])
def test_model_names_that_may_not_be_part_of_a_queues_name(name: str) -> None:
    assert check_model_name("a/b.c_d@e") is check_model_name("x" * 200) is None
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
