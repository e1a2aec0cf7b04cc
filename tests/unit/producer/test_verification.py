"""What is said of each hardware class is the same in the source, in README and by the doctor, and no more than true."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from embedctl.operating.doctor import VERIFIED, Level, class_findings
from embedctl_config import cpu
from embedctl_config.hardware import SHIPPED_CLASSES

ROOT = Path(__file__).parents[3]
#: All that may be said.
STATEMENT = re.compile(r"verified in CI|not verified on hardware|verified on an? [\w -]+ on \d{4}-\d\d-\d\d")
ROW = re.compile(
    r"^\| `([\w-]+)` \| [^|]+ \| ([^|]+) \| `\.\[([\w,]+)\]` \| \[\w+\]\((docs/\w+\.md)\) \|$", re.MULTILINE
)


def test_every_shipped_class_has_a_statement() -> None:
    assert set(VERIFIED) == set(SHIPPED_CLASSES)
    assert all(STATEMENT.fullmatch(each) for each in VERIFIED.values())
    assert {SHIPPED_CLASSES[name].device for name, said in VERIFIED.items() if said == "verified in CI"} == {"cpu"}


def test_readme_says_of_each_class_what_the_source_says_and_how_to_install_it() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n## What works today\n")[2].partition("\n## ")[0]
    rows = ROW.findall(section)
    assert {name: statement for name, statement, _, _ in rows} == VERIFIED
    assert len(rows) == len(VERIFIED)
    for _, _, install, page in rows:
        assert set(install.split(",")) <= set(extras)
        assert (ROOT / page).is_file()


def test_the_doctor_says_it_of_each_class_and_what_to_run_where_the_device_is_here() -> None:
    findings = {each.subject: each for each in class_findings(SHIPPED_CLASSES, {"gpu"})}
    assert set(findings) == {f"class {name}" for name in SHIPPED_CLASSES}
    assert all(each.level is Level.OK for each in findings.values())
    for name, statement in VERIFIED.items():
        assert findings[f"class {name}"].found.startswith(statement)
    assert findings["class cpu"].remedy == ""
    tensorrt, neuron = findings["class gpu-tensorrt"], findings["class neuron"]
    assert tensorrt.remedy.startswith("embedctl model verify MODEL --class gpu-tensorrt ")
    assert (neuron.found, neuron.remedy) == (
        "not verified on hardware; no device of kind neuron is seen here",
        "",
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "amx_tile amx_bf16 amx_int8 avx512_bf16",
            {"cpu-bf16": "has AMX", "cpu-int8": "class cpu-bf16 is about as fast"},
        ),
        ("avx512_bf16 avx512_vnni", {"cpu-bf16": "has AVX512_BF16"}),
        ("avx2", {"cpu-bf16": "has nothing for bf16"}),
    ],
)
def test_the_doctor_says_what_a_cpu_has(flags: str, said: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset(flags.split()))
    findings = {each.subject: each.found for each in class_findings(SHIPPED_CLASSES, set())}
    for name in ("cpu", "cpu-bf16", "cpu-int8"):
        found = findings[f"class {name}"]
        assert said[name] in found if name in said else found == VERIFIED[name]
