"""The examples of the pages run as they stand, and do what the pages say.

Every ``python`` and ``console`` block is run, those of a page one after the other, but for one with a comment just
before it: ``<!-- not run: the reason -->``. A block after ``<!-- needs: PACKAGE -->`` is a recipe, run by itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedctl_config.settings import Settings
from tests.support.gateway import running_gateway
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.packages import need
from tests.support.shim import embedctl_on_path
from tests.support.workers import StartWorker

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
TEXTS = ["one", "two words", "three words here"]
TIMEOUT_S = 200


def examples(page: str, language: str) -> list[str]:
    """The blocks of a page that are to be run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    block = rf"^(<!-- (?:not run|needs|test): [^\n]+ -->\n)?```{language}\n(.*?)^```"
    return [source for comment, source in re.findall(block, text, re.MULTILINE | re.DOTALL) if not comment]


def recipes(page: str, kind: str = "needs") -> dict[str, str]:
    """Package → the block that needs it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return dict(re.findall(rf"^<!-- {kind}: (\w+) -->\n```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


@contextmanager
def gateway_for(page: str, settings: Settings, start_worker: StartWorker) -> Iterator[Callable[[str], str]]:
    """What readers of a page have running beside a worker. Yields what puts its port into an example."""
    if page != "docs/gateway.md":
        yield str
        return
    start_worker(model="all-MiniLM-L6-v2")
    with running_gateway(settings) as gateway:
        yield lambda source: source.replace("http://127.0.0.1:8080", gateway.url)


def commands(block: str) -> list[str]:
    """What a reader types: the lines behind a `$`; the others are what is printed."""
    return [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page, "python")])
def test_python_examples_run(here: Here, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here.start_worker()
    (here.folder / "corpus.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    monkeypatch.chdir(here.folder)
    for name, value in here.environment.items():
        monkeypatch.setenv(name, value)
    names: dict[str, object] = {"__name__": "__main__"}
    with gateway_for(page, here.settings, here.start_worker) as put:
        for source in examples(page, "python"):
            exec(compile(put(source), page, "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page, "console")])
def test_shell_examples_run(here: Here, page: str) -> None:
    rows = [{"id": f"id-{at}", "text": text} for at, text in enumerate(TEXTS)]
    (here.folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here.start_worker()
    lines = ["set -eo pipefail"]
    for block in examples(page, "console"):
        assert commands(block), f"{page} has an example without a command: {block}"
        for command in commands(block):
            # `run` is shown to those who have no Redis yet.
            alone = command.startswith("embedctl run ")
            lines.append(f"(unset EMBEDCTL_REDIS_URL; {command})" if alone else command)
            if "-o vectors.npy" in command:
                lines.append("mv vectors.npy fetched-$((++files)).npy")
    script = here.folder / "examples.sh"
    with gateway_for(page, here.settings, here.start_worker) as put, embedctl_on_path(here.folder) as ours:
        script.write_text(put("\n".join(lines) + "\n"))
        done = subprocess.run(
            ["bash", "-x", str(script)],
            env={
                **here.environment,
                "PATH": os.pathsep.join([ours, str(Path(sys.executable).parent), here.environment["PATH"]]),
                "EMBEDCTL_HARDWARE": "dummy",
                "EMBEDCTL_MODEL": "dummy",
            },
            cwd=here.folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    written = sorted(here.folder.glob("fetched-*.npy"))
    assert len(written) == sum("mv vectors.npy" in line for line in lines)
    for file in written:
        np.testing.assert_array_equal(np.load(file), reference(TEXTS))


#: What a recipe expects to find, and what it must have made of TABLE.
BEFORE = {
    "duckdb": """
import duckdb
with duckdb.connect("documents.duckdb") as made:
    made.execute("CREATE TABLE documents AS SELECT * FROM 'documents.parquet'")
""",
    "django": """
import sys, types
import django
from django.conf import settings
from django.db import connection, models
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
django.setup()
class Document(models.Model):
    text = models.TextField(null=True)
    embedding = models.BinaryField(null=True)
    class Meta:
        app_label = "documents"
sys.modules["documents"] = types.ModuleType("documents")
sys.modules["documents.models"] = types.ModuleType("documents.models")
sys.modules["documents.models"].Document = Document
with connection.schema_editor() as editor:
    editor.create_model(Document)
Document.objects.bulk_create(Document(pk=pk, text=text) for pk, text in zip(TABLE["id"], TABLE["text"]))
""",
}
AFTER = {
    "pandas": 'made = dict(zip(frame["id"], frame["embedding"]))',
    "polars": 'made = dict(zip(frame["id"], frame["embedding"].to_numpy()))',
    "datasets": 'made = dict(zip(dataset["id"], dataset["embedding"]))',
    "duckdb": 'made = dict(db.sql("SELECT * FROM embeddings").fetchall())',
    "django": """
stored = dict(Document.objects.values_list("pk", "embedding"))
made = {pk: data and np.frombuffer(data, np.float32) for pk, data in stored.items()}
""",
}
TABLE = {"id": [70, 80, 90], "text": [TEXTS[0], None, TEXTS[2]]}
CHECK = """
assert {*made} - {80} == {70, 90}
assert made.get(80) is None or np.isnan(made[80]).all()
np.testing.assert_array_equal(np.array([made[70], made[90]], np.float32), expected)
"""


def test_recipes_run(here: Here) -> None:
    here.start_worker()
    found = recipes("docs/library.md")
    assert set(found) == set(AFTER)
    pq.write_table(pa.table(TABLE), here.folder / "documents.parquet")
    np.save(here.folder / "expected.npy", reference([TEXTS[0], TEXTS[2]]))
    missing = [package for package in found if find_spec(package) is None]
    script = here.folder / "recipes.py"
    # One process of its own for all: what they import is large, and Django is set up only once.
    script.write_text(
        f"import numpy as np\nexpected = np.load('expected.npy')\nTABLE = {TABLE}\n"
        + "".join(
            f"print({package!r})\n{BEFORE.get(package, '')}\n{source}\n{AFTER[package]}\n{CHECK}"
            for package, source in found.items()
            if package not in missing
        )
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", str(script)],
        env={**here.environment, "HF_HOME": str(here.folder), "HF_HUB_OFFLINE": "1"},
        cwd=here.folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for package in missing:
        need(package)


@pytest.mark.slow
def test_tests_of_programs_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["embedctl.testing"]\n')
    found = recipes("docs/library.md", "test")
    assert {*found} == {"pytest", "fastapi", "django"}
    for package, source in found.items():
        need(package)
        (tmp_path / f"test_with_{package}.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert re.search(r"^4 passed", done.stdout, re.MULTILINE), done.stdout


def _without_figures(line: str) -> str:
    return re.sub(r"[\d.,]*\d", "N", re.sub(r"\(the worker's log: .*\)", "(the worker's log)", line))


def test_the_first_command_of_the_readme_prints_what_stands_below_it(here: Here) -> None:
    block = next(block for block in examples("README.md", "console") if "embedctl run" in block)
    shown = [line.replace("all-MiniLM-L6-v2", "dummy") for line in block.splitlines() if not line.startswith("$ ")]
    (here.folder / "new").mkdir()
    with embedctl_on_path(here.folder) as ours:
        done = subprocess.run(
            ["bash", "-ec", "\n".join(commands(block))],
            env={**here.environment, "EMBEDCTL_REDIS_URL": "", "PATH": f"{ours}{os.pathsep}{here.environment['PATH']}"},
            cwd=here.folder / "new",
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 0, done.stderr
    # A slow machine adds lines about the progress.
    printed = [line for line in done.stderr.splitlines() if not re.match(r"[a-z]+: ", line)]
    assert [*map(_without_figures, printed)] == [*map(_without_figures, shown)]
