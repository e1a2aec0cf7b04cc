"""What callers are shown of files and batches, in OpenAI's form, and the fields that make them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from embedctl.corpus.batch import URLS
from embedctl.store.batches import StoredBatch
from embedctl.store.stored_files import StoredFile
from embedctl_config import keys
from embedctl_gateway.calls.schemas import LONGEST_S, SHORTEST_S, STATUSES, check_known
from embedctl_gateway.http.fields import digits_of, whole
from embedctl_gateway.http.refusals import Refusal, invalid, refuse

_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")
_PURPOSE = "batch"
#: What ids begin with.
BATCH, FILE = "batch_", "file-"
#: The statuses of a batch that has ended, with and without answers, and of both.
ANSWERED, REFUSED = ("completed", "expired", "cancelled"), "failed"
ENDED = (*ANSWERED, REFUSED)
_WINDOW = "24h"
#: Of metadata: most pairs, and the longest name and value (characters).
_PAIRS, _NAME, _VALUE = 16, 64, 512


def file_object(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": file.created_s,
        "expires_at": file.expires_s,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def page_of(data: Sequence[Mapping[str, Any]], limit: int) -> dict[str, Any]:
    """A page of a list. `data` has up to one object more than it holds."""
    shown = data[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(data) > limit,
    }


def limit_of(given: str | None, otherwise: int, most: int) -> int:
    """The parameter `limit`; raises Refusal if it is no whole number from 1 to `most`."""
    if given is None:
        return otherwise
    limit = digits_of(given, most)
    if not limit:
        refuse(f"limit is not a whole number from 1 to {most:,}", "invalid_value", "limit")
    return limit


def after_of(given: str | None, kind: str) -> str:
    """The parameter `after`; empty if it is not given. Raises Refusal if it is no id that begins with `kind`."""
    if given and not is_id(given, kind):
        refuse("after is not the id of one of these", "invalid_value", "after")
    return given or ""


def is_id(text: str, kind: str) -> bool:
    return text.startswith(kind) and _ID.fullmatch(text) is not None


def missing(what: str, param: str | None = None) -> Refusal:
    return invalid(f"there is no such {what}", "not_found", param, 404)


def ttl_of_form(fields: Mapping[str, str]) -> int:
    """How long a file of a form is kept (seconds); raises Refusal if the form has another purpose, other fields, or
    such a time is not possible."""
    anchor, seconds = "expires_after[anchor]", "expires_after[seconds]"
    check_known(fields, "FileRequest")
    if "purpose" not in fields:
        refuse(f"no purpose: give {_PURPOSE}", "missing_required_parameter", "purpose")
    if fields["purpose"] != _PURPOSE:
        refuse(f"purpose is not {_PURPOSE}: this gateway takes no other files", "invalid_value", "purpose")
    if anchor not in fields and seconds not in fields:
        return keys.FILE_TTL_S
    number = digits_of(fields.get(seconds, ""), 10**8) or 0
    return expiry_of({"anchor": fields.get(anchor), "seconds": number}, "expires_after")


def expiry_of(given: object, param: str) -> int:
    """How long a file is kept (seconds), of `{"anchor": "created_at", "seconds": …}`; raises Refusal if it is not such
    an object."""
    if not isinstance(given, Mapping) or set(given) != {"anchor", "seconds"} or given["anchor"] != "created_at":
        refuse(f"{param} is not an object with the anchor created_at, and seconds", "invalid_value", param)
    seconds = whole(given["seconds"])
    if seconds is None or not SHORTEST_S <= seconds <= LONGEST_S:
        refuse(f"{param}: seconds is not a whole number from {SHORTEST_S:,} to {LONGEST_S:,}", "invalid_value", param)
    return seconds


def batch_object(batch: StoredBatch) -> dict[str, Any]:
    facts, tokens = batch.facts, batch.number("tokens")
    errors = batch.parsed("errors")
    shown: dict[str, Any] = {
        "id": batch.id,
        "object": "batch",
        "endpoint": facts["endpoint"],
        "model": facts.get("model") or None,
        "errors": None if errors is None else {"object": "list", "data": errors},
        "input_file_id": facts["input_file_id"],
        "completion_window": facts["completion_window"],
        "status": batch.status,
        "output_file_id": facts.get("output_file_id") or None,
        "error_file_id": facts.get("error_file_id") or None,
        "created_at": batch.number("created_at"),
        "expires_at": batch.number("expires_at"),
        **{f"{status}_at": batch.number(f"{status}_at") or None for status in STATUSES[1:]},
        "request_counts": {name: batch.number(name) for name in ("total", "completed", "failed")},
        "metadata": batch.parsed("metadata"),
    }
    if "retry_of" in facts:
        shown["embedctl"] = {"retry_of": facts["retry_of"]}
    if "tokens" in facts:
        shown["usage"] = {
            "input_tokens": tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens,
        }
    return shown


def facts_of_batch(fields: Mapping[str, Any]) -> dict[str, object]:
    """The facts of a new batch from the fields of a request, without its tenant; raises Refusal if a field is wrong."""
    check_known(fields, "BatchRequest")
    for name in ("input_file_id", "endpoint", "completion_window"):
        if fields.get(name) is None:
            refuse(f"no {name}", "missing_required_parameter", name)
        if not isinstance(fields[name], str):
            refuse(f"{name} is not a string", "invalid_type", name)
    if fields["endpoint"] not in URLS:
        refuse(f"endpoint is none of {', '.join(URLS)}", "invalid_value", "endpoint")
    if fields["completion_window"] != _WINDOW:
        refuse(f"completion_window is not {_WINDOW}, the only one that there is", "invalid_value", "completion_window")
    expiry = fields.get("output_expires_after")
    return {
        "input_file_id": fields["input_file_id"],
        "endpoint": fields["endpoint"],
        "completion_window": _WINDOW,
        "metadata": json.dumps(_metadata(fields.get("metadata"))),
        "output_ttl_s": keys.FILE_TTL_S if expiry is None else expiry_of(expiry, "output_expires_after"),
    }


def facts_of_retry(batch: StoredBatch) -> dict[str, object]:
    """The facts of a new batch of the requests that an ended one has no vectors of."""
    same = ("tenant", "input_file_id", "endpoint", "completion_window", "metadata", "output_ttl_s")
    # A batch that ended without a file of errors has no answers: all that it was to run is left.
    left = batch.facts.get("error_file_id") or batch.facts.get("retried_file_id", "")
    return {
        **{name: batch.facts[name] for name in same},
        "retry_of": batch.id,
        "retried_file_id": left,
    }


def _metadata(given: object) -> Mapping[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or not all(isinstance(value, str) for value in given.values()):
        refuse("metadata is not an object whose values are strings", "invalid_type", "metadata")
    if len(given) > _PAIRS or any(len(name) > _NAME or len(value) > _VALUE for name, value in given.items()):
        refuse(
            f"metadata has at most {_PAIRS} pairs, with names of {_NAME} and values of {_VALUE} characters",
            "invalid_value",
            "metadata",
        )
    return given
