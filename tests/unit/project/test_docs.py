"""The documentation says what the source does."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urljoin

import click
import pytest
import yaml

from embedctl.cli.commands import COMMANDS, Later
from embedctl_config.loading import FLAGS
from embedctl_config.settings import ENV_PREFIX, SETTINGS
from tests.support.browser import chromium, errors_logged
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[3]
BENCHMARKS = ("request", "grid", "engines")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
#: `--version` does nothing else, and what chooses the jobs to discard stands on the command line alone. The others may
#: be given several times, which a variable can't say.
WITHOUT_VARIABLE = {
    ("embedctl", "--version"),
    ("embedctl discard", "--older-than"),
    ("embedctl discard", "--state"),
    *(("embedctl list", option) for option in ("--state", "--model", "--class", "--tenant")),
    ("embedctl worker", "--model"),
    ("embedctl up", "--class"),
    ("embedctl up", "--model"),
    ("embedctl run", "--limit"),  # a variable that is set for `embedctl list` must not cut a corpus
    ("embedctl submit", "--limit"),
    # Nothing must be deleted because of a variable.
    *itertools.product(("embedctl run", "embedctl submit"), ("--delete", "--delete-at-most")),
    ("embedctl fetch", "--format"),  # EMBEDCTL_FORMAT is that of a corpus
    ("embedctl run", "--input-file"),  # another form of an argument
    ("embedctl fetch", "--input-file"),
    ("embedctl submit", "--input-file"),
    *((f"embedctl bench {name}", option) for name in BENCHMARKS for option in ("--model", "--class")),
    ("embedctl bench engines", "--workload"),
    *(("embedctl bench grid", option) for option in ("--cores", "--length", "--batch")),
}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
#: What a page of the site loads, and where its links lead.
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\s(?:src|href)=\"?([^\"\s>]+)")
LINKED = re.compile(r"<a\b[^>]*?\shref=\"?([^\"\s>]+)")


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = load_generator()


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_the_list_of_commands_says_what_they_say_of_themselves() -> None:
    later = [each for each in COMMANDS.values() if isinstance(each, Later)]
    assert later
    for each in later:
        assert each.get_short_help_str(999) == each.load().get_short_help_str(999)


@pytest.mark.parametrize(("name", "page"), list(GENERATE.PAGES.items()))
def test_generated_pages_are_up_to_date(name: str, page: Callable[[], str]) -> None:
    assert read(f"docs/{name}") == page(), "run `make docs`"


def test_every_command_and_option_has_help() -> None:
    for name, command in GENERATE.commands():
        assert command.help, name
        for parameter in command.params:
            assert not isinstance(parameter, click.Option) or parameter.help, f"{name} {parameter.opts[0]} has no help"


def test_every_command_is_used_in_a_page_written_by_hand() -> None:
    pages = [read(str(page)) for page in PAGES if page.name not in (*GENERATE.PAGES, "CHANGELOG.md")]
    assert [name for name, _ in GENERATE.commands() if not any(name in page for page in pages)] == []


def test_every_exit_status_stands_in_the_readme() -> None:
    readme = read("README.md")
    for status, _ in GENERATE.exit_statuses():
        assert f"\n| {status} | " in readme


@pytest.mark.parametrize("page", ["README.md", "docs/library.md"])
def test_python_in_the_pages_compiles_and_imports_what_exists(page: str) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE):
        compile(block, page, "exec")
        for line in block.splitlines():
            if line.startswith(("from embedctl", "import embedctl")):
                exec(line, {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not heading or heading in headings(file), f"{page.name} links to {target}"


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", ["docs/design.md", "docs/changing.md"])
def test_modules_that_a_page_names_exist(page: str) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    named = re.findall(r"`([\w/]+\.(?:py|lua))`", (ROOT / page).read_text(encoding="utf-8"))
    assert len(named) > 10
    for name in named:
        assert "NAME" in name or any(f"/{path}".endswith(f"/{name}") for path in tracked), name


def test_every_guarantee_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (?!promise |---).+$", read("docs/guarantees.md"), re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+/test_\w+\.py)`", row.split(" | ")[2])
        assert named, row
        assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_risk_of_owasps_list_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (API\d+) .+ \| (.+) \|$", read("docs/gateway.md"), re.MULTILINE)
    assert [risk for risk, _ in rows] == [f"API{number}" for number in range(1, 11)]
    for risk, shown_by in rows:
        named = re.findall(r"`(tests/[\w/]+/test_\w+\.py)::(test_\w+)`", shown_by)
        assert named, risk
        assert [name for file, name in named if f"\ndef {name}(" not in read(file)] == []


def test_every_option_has_a_variable_and_the_settings_know_all_of_them() -> None:
    flags = set()
    for name, command in GENERATE.commands():
        for parameter in command.params:
            if not isinstance(parameter, click.Option) or parameter.hidden:  # a supervisor's alone
                continue
            if (name, parameter.opts[0]) in WITHOUT_VARIABLE:
                continue
            assert isinstance(parameter.envvar, str), f"{name} {parameter.opts[0]} has no variable"
            assert parameter.envvar.startswith(ENV_PREFIX)
            assert parameter.show_envvar, f"{name} {parameter.opts[0]} does not show its variable"
            flags.add(parameter.envvar.removeprefix(ENV_PREFIX).lower())
    assert flags - set(SETTINGS) == FLAGS


def test_a_mark_that_an_example_is_not_run_stands_just_before_one() -> None:
    for page in PAGES:
        for mark, after in pairwise(read(str(page)).splitlines()):
            if mark.startswith("<!-- not run"):
                assert re.fullmatch(r"<!-- not run: .+ -->", mark), page
                assert after in ("```console", "```python"), page


def leaves(entry: Any) -> Iterator[str]:
    """The pages in a part of the site's navigation."""
    if isinstance(entry, str):
        yield entry
        return
    for each in entry.values() if isinstance(entry, dict) else entry:
        yield from leaves(each)


def test_every_page_stands_in_the_navigation_of_the_site_once() -> None:
    # The base loader leaves the tag of the function that makes anchors alone.
    site = yaml.load(read("mkdocs.yml"), Loader=yaml.BaseLoader)
    assert sorted(leaves(site["nav"])) == sorted(str(page.relative_to(ROOT)) for page in PAGES)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a link or an anchor that leads nowhere fails the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def found(pattern: re.Pattern[str], site: Path) -> Iterator[str]:
    """Each target of each page, as seen from the top of the site; the page for wrong addresses needs a server."""
    for page in site.rglob("*.html"):
        if page.name != "404.html":
            where = str(page.relative_to(site))
            for target in pattern.findall(page.read_text(encoding="utf-8")):
                yield urljoin(where, target).partition("#")[0].partition("?")[0]


@pytest.mark.slow
def test_the_site_holds_the_pages_and_loads_and_links_to_nothing_that_it_leaves_out(site: Path) -> None:
    loaded = set(found(LOADED, site))
    assert [each for each in loaded if not (site / each).is_file()] == []
    pictures = {str(each.relative_to(ROOT)) for each in (ROOT / "docs").rglob("*.svg")}
    assert pictures | {"docs/iframe-worker.js"} <= loaded
    assert not [each for each in site.rglob("*.css") if re.search(r"url\(.?(https?:)?//", each.read_text("utf-8"))]

    pages = {str(page.relative_to(ROOT).with_suffix(".html")) for page in PAGES} - {"README.html"} | {"index.html"}
    held = {str(page.relative_to(site)) for page in site.rglob("*.html")} - {"404.html"}
    assert held == pages
    assert [each for each in found(LINKED, site) if "://" not in each and not (site / each).is_file()] == []
    assert not [*site.rglob("*.py"), *site.rglob("*.pyc")]
    page = (site / "docs" / "accuracy.html").read_text(encoding="utf-8")
    assert "texts (<code>workers/embedctl_workers/models/gate_texts.py</code>)" in page, "a source file's path, no link"


@pytest.mark.browser
def test_the_site_is_searched_from_its_folder_without_a_server_or_a_network(site: Path) -> None:
    with chromium("--window-size=1300,900", "--host-resolver-rules=MAP * ~NOTFOUND") as browser:
        browser.get((site / "docs" / "library.html").as_uri())
        browser.find_element("css selector", ".md-search__input").send_keys("noeviction")
        links = "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.pathname)"
        page = str(site / "docs" / "operations.html")
        eventually(lambda: page in browser.execute_script(links), what=f"{page} among the results")
        assert errors_logged(browser) == []
