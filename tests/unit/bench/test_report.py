"""A report's files say what the report says, whatever it holds."""

from __future__ import annotations

from math import nan
from pathlib import Path

from embedctl_bench.report import Column, Report, Table, write_report

SAMPLE = Report(
    name="sample",
    title="A sample, with <angle brackets> & an ampersand",
    command="embedctl bench sample -o report/",
    workload="Jobs of **255 texts**; `--quick < 1` takes a tenth. 1 < 2 & 3.",
    machine={"virtual machine": True, "versions": {"embedctl": "0.1.0", "torch": "2.13.0"}},
    tables=[
        Table(
            "requests",
            "Requests per second",
            [Column("system", "system"), Column("rate", "requests (1/s)", 2), Column("none", "none")],
            [
                {"system": "embedctl", "rate": 1234.567, "_bold": True},
                {"system": "st | torch", "rate": 0.05, "_noisy": True},
                {"system": "<script>alert(1)</script>", "rate": nan},
                {"system": "infinity", "rate": 0.10, "_published": True},
            ],
        )
    ],
    notes=["Every ratio is of one run."],
)


def test_a_page_is_markdown_whose_cells_are_rounded_marked_and_escaped(tmp_path: Path) -> None:
    path = write_report(SAMPLE, tmp_path / "new")
    assert {each.name for each in path.parent.iterdir()} == {"sample.md", "sample.json"}, "nothing half written is left"
    text = path.read_text()
    assert "# A sample, with &lt;angle brackets> & an ampersand" in text
    assert "Jobs of **255 texts**; `--quick < 1` takes a tenth. 1 &lt; 2 & 3." in text
    assert "- virtual machine: yes\n- versions: embedctl 0.1.0, torch 2.13.0" in text
    assert (
        """\
| system | requests (1/s) |
| --- | ---: |
| **embedctl** | **1,234.57** |
| st \\| torch *(noisy)* | 0.05 |
| &lt;script>alert(1)&lt;/script> | – |
| infinity *(other hardware)* | 0.10 |
"""
        in text
    )
    assert text.endswith("## Notes\n\n- Every ratio is of one run.\n")
