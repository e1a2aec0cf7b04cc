"""What the commands of `embedctl bench` share: options, files, Ctrl-C."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from embedctl_bench import asking as cli
from embedctl_bench.asking import Asked, common
from embedctl_config.cpu import no_bf16
from embedctl_config.errors import MissingExtra
from embedctl_config.extras import Installed
from embedctl_workers.machine.devices import usable_cpus

#: Only some CPUs have something for this class.
BF16 = () if no_bf16() else ("cpu-bf16",)


@pytest.fixture(autouse=True)
def _no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the person who runs the tests must not affect them."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def ask(*arguments: str, env: dict[str, str] | None = None) -> Asked:
    """What a command is given for these arguments; errors pass."""
    got: list[Asked] = []

    @click.command()
    @common
    @click.option("--own", default=3)
    def command(asked: Asked, own: int) -> None:
        assert own == 3
        got.append(asked)

    result = CliRunner().invoke(command, arguments, env=env)
    if result.exception:
        raise result.exception
    return got[0]


def test_defaults_are_minilm_and_every_class_of_cpus_on_all_cpus() -> None:
    asked = ask()
    assert asked.models == ("all-MiniLM-L6-v2",)
    assert asked.cpus == usable_cpus(None)
    assert (asked.output, asked.quick, asked.peers) == (Path("report"), False, None)


def test_a_configured_class_of_cpus_is_measured_too_and_one_of_gpus_is_not(tmp_path: Path) -> None:
    (tmp_path / "embedctl.toml").write_text(
        '[classes.onnx]\nbackend = "onnx"\n[classes.mine]\ndevice = "gpu"\n[classes.fake]\nbackend = "dummy"\n'
    )
    assert ask().classes == ("cpu", *BF16, "cpu-int8", "onnx")


def test_options_can_be_repeated_and_have_variables() -> None:
    asked = ask("--model", "a", "--model", "b", "--class", "cpu", "--class", "cpu", "--peers", "a, b,a")
    assert (asked.models, asked.classes, asked.peers) == (("a", "b"), ("cpu",), ("a", "b"))
    assert [ask("--peers", given).peers for given in ("none", "all")] == [(), ("all",)]
    variables = {"EMBEDCTL_QUICK": "1", "EMBEDCTL_CPUS": "0", "EMBEDCTL_FRESH": "true"}
    asked = ask(env=variables)
    assert (asked.quick, asked.cpus, asked.fresh) == (True, frozenset({0}), True)


def test_without_the_extra_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "installed", lambda extra: Installed((), ("no psutil",)))
    with pytest.raises(MissingExtra, match=r"embedctl\[bench\]"):
        ask()


def test_a_session_is_of_the_classes_as_they_are_configured(tmp_path: Path) -> None:
    def measured(value: int, *arguments: str) -> int:
        with ask(*arguments).session("engines", 1) as session:
            return session.step("one", lambda: value)

    assert [measured(1), measured(2)] == [1, 1]
    (tmp_path / "embedctl.toml").write_text("[classes.cpu]\ntoken_budget = 99\n")
    assert [measured(3), measured(4, "--quick")] == [3, 4]
