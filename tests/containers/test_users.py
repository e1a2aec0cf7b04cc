"""A stack whose passwords, and whose folder, have signs that shells, URLs and Compose read."""

from __future__ import annotations

import base64
import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from tests.containers.boxes import SLOW_DUMMY, Boxes
from tests.support.jobs import reference

pytestmark = [pytest.mark.slow, pytest.mark.long_fault, pytest.mark.timeout(1800)]

SIGNS = """a $HOME ${X} $$ %41 "q" 'p' `b` \\\\n @:/?#&=+;,<>|*"""
TEXTS = [f"text {at}" for at in range(20)]


def test_passwords_may_have_any_sign(images: None, tmp_path: Path) -> None:
    boxes = Boxes(tmp_path / "a clone", SLOW_DUMMY)
    (boxes.folder / "secrets").mkdir(mode=0o700)
    for user in ("worker", "producer", "monitor", "flower"):
        (boxes.folder / "secrets" / user).write_text(f"{user} {SIGNS}\n")
    (boxes.folder / "secrets" / "flower-users").write_text(f"admin:{SIGNS}\n")
    boxes.set_up()
    try:
        boxes.compose("up", "--detach")
        for service in ("redis", "flower"):
            boxes.wait_healthy(service)
        boxes.wait_ready()
        corpus = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
        (boxes.folder / "data" / "corpus.jsonl").write_text(corpus)
        boxes.cli("submit", "corpus.jsonl", "-o", "within.npy")
        boxes.outside("submit", "corpus.jsonl", "-o", "outside.npy")
        for name in ("within.npy", "outside.npy"):
            np.testing.assert_array_equal(np.load(boxes.folder / "data" / name), reference(TEXTS))
        login = base64.b64encode(f"admin:{SIGNS}".encode()).decode()
        page = urllib.request.Request(
            f"http://127.0.0.1:{boxes.flower_port}/api/workers", headers={"Authorization": f"Basic {login}"}
        )
        with urllib.request.urlopen(page, timeout=60) as answer:
            assert answer.status == 200
    finally:
        boxes.down()
