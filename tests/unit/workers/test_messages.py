"""What comes from a queue and is no ticket is dropped; what instrumented programs add to a ticket is not."""

from __future__ import annotations

import pytest

from embedctl_config.celery_app import TASK
from embedctl_workers.serving.messages import MAX_BODY_BYTES, MAX_HEADERS_LENGTH, flaw_of

HEADERS = {"task": TASK, "id": "1", "lang": "py"}


@pytest.mark.parametrize("more", [{"baggage": "k=v," * 2048}, {"baggage": ["k=v," * 1500, {"traceparent": "00-1"}]}])
def test_a_ticket_may_have_as_much_baggage_as_opentelemetry_allows(more: dict[str, object]) -> None:
    assert flaw_of({**HEADERS, **more}, b"[]") == ""


@pytest.mark.parametrize(
    "more",
    [
        {"baggage": "x" * (8 * 1024 + 1)},
        {"x" * (8 * 1024 + 1): 1},
        {str(i): "x" * 1024 for i in range(MAX_HEADERS_LENGTH // 1024)},
        {"deep": [["x" * 4096] * 2] * 3},
        {"list": [0] * 65},
        {str(i): 0 for i in range(64)},
    ],
)
def test_headers_are_bounded_one_by_one_and_together(more: dict[str, object]) -> None:
    assert flaw_of({**HEADERS, **more}, b"[]") == "its headers are not those of a ticket"


@pytest.mark.parametrize(
    ("headers", "body"),
    [(HEADERS, b"x" * (MAX_BODY_BYTES + 1)), (HEADERS, None), (None, b""), ({**HEADERS, "compression": "gzip"}, b"")],
)
def test_what_is_no_ticket_has_a_flaw(headers: object, body: object) -> None:
    assert flaw_of(headers, body)
