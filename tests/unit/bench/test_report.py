"""A report's files say what the report says, whatever it holds."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from embedctl_bench.report.files import write_report
from embedctl_bench.report.plots import draw
from embedctl_bench.report.report import Column, Plot, Report, Series, Table
from embedctl_bench.report.text import is_number
from tests.support.bench_reports import LENGTHS, sample_report

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[bench]'")

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """What stands in a page: the text by element, the attributes, whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def of(self, tag: str) -> list[str]:
        return [text for each, text in self.texts if each == tag]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("report") / "new"
    paths = write_report(sample_report(), folder)
    assert sorted(paths) == sorted(folder.iterdir()), "what is written is told, and nothing half written is left"
    return {path.name: path.read_text() for path in paths}


@pytest.fixture(scope="module")
def page(written: dict[str, str]) -> Page:
    return Page(written["sample.html"])


def test_each_table_and_plot_has_a_file_and_the_page_comes_first(written: dict[str, str]) -> None:
    assert next(iter(written)) == "sample.html"
    assert set(written) == {
        "sample.html",
        "sample.md",
        "sample.json",
        "sample-requests.csv",
        "sample-lengths.csv",
        "sample-throughput.svg",
        "sample-systems.svg",
    }


def test_the_page_is_whole_and_needs_nothing_else(page: Page) -> None:
    assert page.open == []
    assert not [each for each in page.attributes if each[0] in ("script", "link", "img", "iframe", "object")]
    loaded = [value for _, name, value in page.attributes if name in ("src", "href", "xlink:href", "srcset")]
    assert loaded
    assert all(value.startswith("#") for value in loaded)
    assert "url(#" not in "".join(page.of("style"))


def test_ids_are_there_once_and_links_lead_to_them(page: Page) -> None:
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    pointed = {value.removeprefix("#") for _, name, value in page.attributes if name == "href"}
    pointed |= {value for _, name, value in page.attributes if name == "aria-labelledby"}
    pointed |= {found[1] for _, _, value in page.attributes if (found := re.fullmatch(r"url\(#(.+)\)", value))}
    assert pointed <= set(ids)


def test_what_could_be_markup_is_text(page: Page, written: dict[str, str]) -> None:
    assert "<script>alert(1)</script>" in page.of("th")
    assert "<script>" not in written["sample.html"]
    assert sample_report().title in page.of("h1")


def test_marks_in_text_become_bold_and_code(page: Page) -> None:
    assert {"255 texts", "two", "bold", "No"} <= set(page.of("strong"))
    assert {"--quick", "threads", "installed"} <= set(page.of("code"))
    assert "**" not in "".join(text for _, text in page.texts)


def test_a_claim_that_is_not_met_comes_first_and_says_so(page: Page) -> None:
    assert page.of("h3") == ["the last row is ≥ 8.8\u00a0× the first", "int8 is ≥ 2.5\u00a0× sentence-transformers"]
    assert page.of("span")[:2] == ["– not met", "– met"]
    assert ("li", "class", "unmet") in page.attributes
    assert any(text.startswith("1 of 2 met") for text in page.of("p"))


def test_cells_are_rounded_grouped_and_marked(page: Page) -> None:
    cells = page.of("td")
    assert cells[:9] == ["0.12", "1,234.6", "yes", "0.05", "–", "no", "–", "3.0", "yes"]
    assert page.of("span")[2:] == ["noisy", "other hardware"]
    assert ("tr", "class", "bold") in page.attributes
    assert ("tr", "class", "published") in page.attributes


def test_pictures_are_named_and_take_the_page_s_colours(written: dict[str, str]) -> None:
    pictures = re.findall(r"<svg.*?</svg>", written["sample.html"], re.DOTALL)
    assert len(pictures) == 2
    for picture in pictures:
        assert 'role="img" aria-label="' in picture.split(">")[0]
        assert "var(--ink)" in picture
        assert "var(--series-1)" in picture
        assert not re.search(r"#(010203|020304|fdfcfb)", picture)
        assert "width=" not in picture.split(">")[0]
    styles = written["sample.html"].split("</style>")[0]
    for name in set(re.findall(r"var\((--[\w-]+)\)", "".join(pictures))):
        assert styles.count(f"{name}: ") == 2, f"{name} has a colour for light and one for dark"


def test_a_picture_s_file_is_svg_with_its_own_colours_and_words(written: dict[str, str]) -> None:
    picture = written["sample-throughput.svg"]
    words = " ".join(ET.fromstring(picture).itertext())
    assert "Throughput by length at $0.758 and $1 an hour" in words
    assert "published, other hardware" in words
    assert "var(" not in picture
    assert len(picture) < 40_000
    bars = " ".join(ET.fromstring(written["sample-systems.svg"]).itertext())
    assert {"17.9", "6.1", "9.5", "3.25"} <= set(bars.split())
    assert "sentence-transformers <torch>" in bars


def test_a_picture_of_the_same_figures_is_the_same(written: dict[str, str], tmp_path: Path) -> None:
    write_report(sample_report(), tmp_path)
    for name, text in written.items():
        assert (tmp_path / name).read_text() == text


def test_markdown_has_tables_that_markdown_reads(written: dict[str, str]) -> None:
    text = written["sample.md"]
    assert "| the last row is ≥ 8.8 × the first | 68 → 602 req/s: 8.8 × | **4.1 ×** | **no** | Of **two** cores" in text
    assert "| **embedctl, class cpu** | **0.12** | **1,234.6** | **yes** |" in text
    assert "| sentence-transformers \\| torch *(noisy)* | 0.05 | – | no |" in text
    assert "| infinity, its documentation *(other hardware)* | 0.10 | – | – |" in text
    assert "![Throughput by length at $0.758 and $1 an hour](sample-throughput.svg)" in text
    assert "- versions: embedctl 0.1.0, torch 2.13.0" in text
    assert "| &lt;script>alert(1)&lt;/script> | – | 3.0 | yes |" in text
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
            assert re.fullmatch(r"[|\-: ]+", lines[1])


def test_csv_holds_what_was_measured_unrounded(written: dict[str, str]) -> None:
    rows = list(csv.DictReader(written["sample-requests.csv"].splitlines()))
    assert rows[0]["rate"] == "0.123456"
    assert [row["noisy"] for row in rows] == ["", "yes", "", ""]
    assert rows[3] == {
        "system": "infinity, its documentation", "rate": "0.1", "p99": "", "exact": "", "noisy": "", "published": "yes",
    }  # fmt: skip
    assert set(next(csv.reader(written["sample-lengths.csv"].splitlines()))) == {"system", *(f"l{n}" for n in LENGTHS)}


def test_json_holds_everything_and_no_nan(written: dict[str, str]) -> None:
    def fails(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    found = json.loads(written["sample.json"], parse_constant=fails)
    assert set(found) == {each.name for each in dataclasses.fields(Report)}
    assert found["tables"][0]["rows"][2]["rate"] is None
    assert found["claims"][1]["met"] is False


@pytest.mark.parametrize("name", ["two words", "../up", "requests"])
def test_a_name_that_is_no_file_s_or_another_s_is_refused(name: str, tmp_path: Path) -> None:
    report = sample_report()
    renamed = [report.tables[0], dataclasses.replace(report.tables[1], name=name)]
    with pytest.raises(ValueError, match="names"):
        write_report(dataclasses.replace(report, tables=renamed), tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_empty_report_is_a_page_too(tmp_path: Path) -> None:
    report = Report("empty", "Nothing", "embedctl bench nothing", "None.", {}, tables=[], plots=[])
    page, *_ = write_report(report, tmp_path)
    assert Page(page.read_text()).of("h2") == ["Workload", "Machine"]


def test_what_was_not_measured_is_said_and_not_drawn(tmp_path: Path) -> None:
    report = sample_report()
    empty = [dataclasses.replace(table, rows=[]) for table in report.tables]
    blank = [dataclasses.replace(report.plots[0], series=[Series("x", [1], [float("nan")])])]
    page, *_ = write_report(dataclasses.replace(report, tables=empty, plots=blank), tmp_path)
    assert Page(page.read_text()).of("td") == ["Nothing was measured."] * 2
    assert not list(tmp_path.glob("*.svg"))


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (float("nan"), "–"), (1234, "1,234.00"), (True, "yes"), ("as it is", "as it is"), (0.005, "0.01")],
)
def test_a_value_as_people_read_it(value: object, shown: str) -> None:
    assert Column("x", "x", digits=2).show({"x": value}) == shown


def test_numbers_stand_on_the_right_and_words_on_the_left() -> None:
    rows = [{"n": 1, "w": "1", "b": True, "d": None}, {"n": 2.5, "w": "x", "b": False}]
    columns = [Column("n", "n"), Column("w", "w"), Column("b", "b"), Column("d", "d", digits=1), Column("none", "none")]
    table = Table("t", "T", columns, rows)
    assert [is_number(column, table) for column in columns] == [True, False, False, True, False]


@pytest.mark.parametrize(("highest", "logarithmic"), [(40.0, False), (400.0, True)])
def test_a_logarithmic_axis_has_more_than_one_number_on_it(highest: float, logarithmic: bool) -> None:
    plot = Plot("rates", "Rates", "batch", "texts/s", [Series("a", [1, 2], [30.0, highest])], log_y=True)
    words = " ".join(ET.fromstring(draw(plot)).itertext()).split()
    assert ("0" in words) is not logarithmic
    assert ("100" in words) is logarithmic
