"""Why a request gets no vectors, and how clients of OpenAI and of TEI are told."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

from starlette.responses import JSONResponse, Response

from embedctl.destinations.answers import told_of
from embedctl.store.stored_files import FileGone, KeepsEnough, OtherRequest
from embedctl.waiting.results import FailedRecord
from embedctl_config.errors import (
    BrokerFull,
    BrokerRefused,
    BrokerUnavailable,
    EmbedctlError,
    InputError,
    JobCancelled,
    JobNotFound,
    QuotaExceeded,
    SettingsError,
    WaitTimeout,
)

log = logging.getLogger(__name__)

#: OpenAI's clients come again after as long as they are told, if that is at most 120 s (seconds).
BUSY_S, AWAY_S = 1, 5


class Refusal(Exception):
    """Raised in place of an answer, with HTTP's status, the code and the parameter as OpenAI names them, None if there
    is none, and the response's headers."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}

    @property
    def kind(self) -> str:
        """OpenAI's type of the error."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


#: Makes the response of a refusal.
Style = Callable[[Refusal], Response]


def invalid(message: str, code: str, param: str | None = None, status: int = 400) -> Refusal:
    """The refusal of a request that would be refused each time."""
    return Refusal(status, message, code, param)


def refuse(message: str, code: str, param: str | None = None, status: int = 400) -> NoReturn:
    raise invalid(message, code, param, status)


def busy(message: str) -> Refusal:
    return Refusal(429, message, "rate_limit_exceeded", None, {"retry-after": str(BUSY_S)})


def limited(error: QuotaExceeded, code: str = "rate_limit_exceeded") -> Refusal:
    """The refusal of what a tenant's limits leave no room for. OpenAI's clients take milliseconds too."""
    after_s = error.after_s or BUSY_S
    headers = {"retry-after": str(math.ceil(after_s)), "retry-after-ms": str(math.ceil(after_s * 1000))}
    if error.limit == "max_requests_s":
        headers |= {
            "x-ratelimit-limit-requests": str(error.most),
            "x-ratelimit-remaining-requests": "0",
            "x-ratelimit-reset-requests": f"{math.ceil(after_s * 1000)}ms",
        }
    return Refusal(429, str(error), code, None, headers)


def unavailable(message: str, code: str = "unavailable") -> Refusal:
    """The refusal of a request that may be answered later."""
    return Refusal(503, message, code, None, {"retry-after": str(AWAY_S)})


def broken() -> Refusal:
    return Refusal(500, "the gateway failed; its log says where", "internal_error")


def timed_out(limit_s: float) -> Refusal:
    return unavailable(f"no answer within {limit_s:g} s (gateway_timeout_s): the workers are busy, or gone", "timeout")


def refusal_of(error: EmbedctlError) -> Refusal:
    """What a caller is told of an error of the library. Only messages that are about the request are passed on."""
    if isinstance(error, BrokerFull):
        return unavailable(str(error), "broker_full")
    if isinstance(error, BrokerUnavailable) and not isinstance(error, BrokerRefused):
        return unavailable("the queue can't be reached now")
    if isinstance(error, WaitTimeout | JobNotFound):  # it is not found if Redis lost it
        return unavailable("the vectors were not ready in time", "timeout")
    if isinstance(error, QuotaExceeded):
        return limited(error)
    if isinstance(error, KeepsEnough):
        return busy(str(error))
    if isinstance(error, FileGone):
        return invalid("the file has been deleted, or has expired", "not_found", None, 404)
    if isinstance(error, OtherRequest):
        return invalid(f"{error}: give each request a key of its own", "idempotency_key_reused", None, 422)
    if isinstance(error, JobCancelled):
        return unavailable("the request's job was ended by somebody else", "stopped")
    if isinstance(error, SettingsError | InputError):
        return invalid(str(error), "invalid_value")
    return broken()


def refusal_of_record(error: FailedRecord, inputs: int) -> Refusal:
    told = told_of(error, "input", 0, inputs)
    return Refusal(400 if told.param else 500, told.message, told.code, told.param)


def as_openai(refusal: Refusal) -> Response:
    told = {"message": refusal.message, "type": refusal.kind, "param": refusal.param, "code": refusal.code}
    return JSONResponse({"error": told}, refusal.status, refusal.headers)


#: The statuses and types that TEI has for what OpenAI gives codes.
_OF_CODE = {
    "empty_input": (400, "Empty"),
    "context_length_exceeded": (413, "Validation"),
    "output_not_given": (424, "Backend"),
}
_OF_STATUS = {400: (422, "Validation"), 429: (429, "Overloaded"), 500: (424, "Backend"), 503: (503, "Unhealthy")}


def as_tei(refusal: Refusal) -> Response:
    status, kind = _OF_CODE.get(refusal.code or "") or _OF_STATUS.get(refusal.status, (refusal.status, "Validation"))
    return JSONResponse({"error": refusal.message, "error_type": kind}, status, refusal.headers)


def log_failure(what: str, error: BaseException) -> None:
    """Log where the gateway failed, without the error's message, which may quote a text."""
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s %s:\n%s", what, type(error).__name__, where)
