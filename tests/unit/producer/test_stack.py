"""Commands that hand over to a process of their own."""

from __future__ import annotations

import pytest

from embedctl.cli import main, stack


def test_an_image_names_the_bench_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(stack, "find_spec", lambda _: None)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "request"])
    assert ended.value.code == 1
    assert "pip install 'embedctl[bench]'" in capsys.readouterr().err
