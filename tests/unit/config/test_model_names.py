"""Names that mean one repository, and names that resemble one."""

from __future__ import annotations

import pytest

from embedctl_config.model_names import hub_id, near_names, other_spelling

SHORT, LONG = "all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"


@pytest.mark.parametrize(
    ("name", "other"),
    [
        (SHORT, LONG),
        (LONG, SHORT),
        ("BAAI/bge-small-en-v1.5", None),
        ("sentence-transformers/", None),
        ("sentence-transformers/a/b", None),
        ("./all-MiniLM-L6-v2", None),
    ],
)
def test_only_the_organisation_that_may_be_left_out_has_another_spelling(name: str, other: str | None) -> None:
    assert other_spelling(name) == other
    assert other is None or hub_id(name) == hub_id(other) == LONG


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("all-MiniLM-L6-v3", (SHORT,)),
        ("all-minilm-l6-v2", (SHORT,)),
        ("sentence-transformers/all-MiniLM-L6-v3", (SHORT,)),
        ("bge-small-en-v1.5", ("BAAI/bge-small-en-v1.5",)),
        ("bge-smal-en", ("BAAI/bge-small-en-v1.5",)),
        ("clip-ViT-B-32", ()),
        (SHORT, ()),
    ],
)
def test_near_names_resemble_the_name_without_its_organisation(name: str, near: tuple[str, ...]) -> None:
    assert near_names(name, [SHORT, "BAAI/bge-small-en-v1.5", "dummy"]) == near
