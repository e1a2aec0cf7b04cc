"""A report's files say what the report says, whatever it holds."""

from __future__ import annotations

import dataclasses
import json
import re
from math import nan
from pathlib import Path

import pytest

from embedctl_bench.report import Claim, Column, Report, Table, write_report

COLUMNS = [Column("system", "system"), Column("rate", "requests (1/s)", 2), Column("p99", "p99 (ms)", 1)]
SAMPLE = Report(
    name="sample",
    title="A sample, with <angle brackets> & an ampersand",
    command="embedctl bench sample -o report/",
    workload="Jobs of **255 texts**; `--quick < 1` takes a tenth. 1 < 2 & 3.",
    machine={"virtual machine": True, "versions": {"embedctl": "0.1.0", "torch": "2.13.0"}},
    claims=[
        Claim("int8 is ≥ 2.5 × fp32", "2.5 ×", "2.9 ×", met=True),
        Claim("the last is ≥ 8.8 × the first", "68 → 602", "4.1 ×", met=False, why="Of **two** cores."),
    ],
    tables=[
        Table(
            "requests",
            "Requests per second",
            [*COLUMNS, Column("exact", "exact"), Column("count", "count", 0), Column("none", "none")],
            [
                {"system": "embedctl", "rate": 0.123456, "p99": 1234.567, "exact": "yes", "count": 3, "_bold": True},
                {"system": "st | torch", "rate": 0.05, "p99": None, "exact": "no", "count": 4, "_noisy": True},
                {"system": "<script>alert(1)</script>", "rate": nan, "p99": 3, "exact": "yes"},
                {"system": "infinity", "rate": 0.10, "_published": True},
            ],
            note="A note with `code`.",
        )
    ],
    notes=["Every ratio is of one run."],
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report") / "new"
    path = write_report(SAMPLE, folder)
    assert path == folder / "sample.md"
    assert {each.name for each in folder.iterdir()} == {"sample.md", "sample.json"}, "nothing half written is left"
    return path.read_text()


def test_cells_are_rounded_grouped_and_marked(text: str) -> None:
    assert "| system | requests (1/s) | p99 (ms) | exact | count |\n| --- | ---: | ---: | --- | ---: |" in text
    assert "| **embedctl** | **0.12** | **1,234.6** | **yes** | **3** |" in text
    assert "| st \\| torch *(noisy)* | 0.05 | – | no | 4 |" in text
    assert "| infinity *(other hardware)* | 0.10 | – | – | – |" in text


def test_what_could_be_markup_is_text_except_in_code(text: str) -> None:
    assert "# A sample, with &lt;angle brackets> & an ampersand" in text
    assert "Jobs of **255 texts**; `--quick < 1` takes a tenth. 1 &lt; 2 & 3." in text
    assert "| &lt;script>alert(1)&lt;/script> | – | 3.0 | yes | – |" in text


def test_a_claim_that_is_not_met_says_so(text: str) -> None:
    assert "| int8 is ≥ 2.5 × fp32 | 2.5 × | 2.9 × | yes |  |" in text
    assert "| the last is ≥ 8.8 × the first | 68 → 602 | **4.1 ×** | **no** | Of **two** cores. |" in text


def test_the_machine_and_the_notes_are_lists(text: str) -> None:
    assert "- virtual machine: yes\n- versions: embedctl 0.1.0, torch 2.13.0" in text
    assert text.endswith("## Notes\n\n- Every ratio is of one run.\n")


def test_every_line_of_a_table_has_as_many_cells(text: str) -> None:
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_json_holds_everything_unrounded_and_no_nan(tmp_path: Path) -> None:
    def fails(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    found = json.loads(write_report(SAMPLE, tmp_path).with_suffix(".json").read_text(), parse_constant=fails)
    assert set(found) == {each.name for each in dataclasses.fields(Report)}
    assert [row["rate"] for row in found["tables"][0]["rows"]] == [0.123456, 0.05, None, 0.1]
    assert found["claims"][1]["met"] is False
