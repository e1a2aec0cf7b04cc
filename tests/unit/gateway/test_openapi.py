"""The description of the gateway's calls is that of the calls."""

from __future__ import annotations

import json
import re

import jsonschema

from embedctl_gateway.calls import openapi
from embedctl_gateway.calls.page import page as shown
from embedctl_gateway.serving.application import CALLS

DOCUMENT = openapi.document()


def described() -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, calls in DOCUMENT["paths"].items() for method in calls}


def test_every_call_is_described_and_no_other() -> None:
    calls = {(method, path.replace(":path", "")) for method, path, _, _ in CALLS}
    assert {(method, path.removeprefix("/v1")) for method, path in described()} == calls


def test_all_references_lead_somewhere_and_schemas_are_schemas() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)))
    assert named == set(schemas)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    identifiers = [call["operationId"] for calls in DOCUMENT["paths"].values() for call in calls.values()]
    assert len(set(identifiers)) == len(identifiers)


def test_the_page_shows_every_call_and_loads_nothing() -> None:
    page = shown()
    assert all(f"<b>{method}</b> <code>{path}</code>" in page for method, path in described())
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import|https?://", page)
    assert "color-scheme: light dark" in page
    assert "{" not in re.sub(r"<(pre|style)>.*?</\1>|/v1/\w+(/\w+|/\{\w+\})+", "", page, flags=re.DOTALL)
