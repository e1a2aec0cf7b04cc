"""What the gateway counts: requests, bytes, tokens; and what its callers hear."""

from __future__ import annotations

import subprocess
import sys

import pytest

from embedctl_config.errors import (
    BrokerFull,
    EmbedctlError,
    InputError,
    JobLost,
    NotPermitted,
    QuotaExceeded,
    SettingsError,
    WaitTimeout,
)
from embedctl_gateway.access.admission import Admission
from embedctl_gateway.calls.common import MAX_TOKENS, check_sizes
from embedctl_gateway.embedding.catalogue import Served
from embedctl_gateway.embedding.embedder import Asked
from embedctl_gateway.http.refusals import Refusal, refusal_of


def test_a_missing_extra_is_named() -> None:
    start = "from embedctl_gateway.__main__ import main; main(['--address', '0'])"
    code = f"import sys; sys.modules['starlette'] = None; {start}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    told = "`embedctl gateway` needs an optional dependency: pip install 'embedctl[gateway]'"
    assert (done.returncode, done.stderr.strip()) == (1, f"embedctl gateway: {told}")


def test_bytes_are_bounded_but_one_request_may_have_more() -> None:
    admission = Admission(2, max_bytes=100)
    with admission.bytes_held() as large:
        large.hold(80)
        large.hold(80)  # nobody else has any
        with admission.bytes_held() as small, pytest.raises(Refusal):
            small.hold(1)
        assert admission.held == 160
    assert admission.held == 0
    with admission.bytes_held() as one, admission.bytes_held() as other:
        one.hold(60)
        other.hold(40)
        with pytest.raises(Refusal):
            other.hold(1)
    assert admission.held == 0


def test_tokens_are_estimated_up_to_those_that_the_model_takes() -> None:
    short, long = "word " * 100, "word " * 100_000
    served = Served("m", "fp32", 16, 256, "")
    check_sizes(Asked([long] * 1000), served)  # 256,000 tokens are encoded
    with pytest.raises(Refusal):
        check_sizes(Asked([long] * 3, truncation="mean"), served)
    for texts, most in (([long] * 2000, 256), ([long] * 3, 0), ([short] * 2600, 0)):
        with pytest.raises(Refusal) as refused:
            check_sizes(Asked(texts), Served("m", "fp32", 16, most, ""))
        assert (refused.value.code, f"{MAX_TOKENS:,}" in refused.value.message) == ("max_tokens_per_request", True)


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (BrokerFull("at redis://secret"), 503, False),
        (WaitTimeout("job secret"), 503, False),
        (NotPermitted("secret"), 500, False),
        (JobLost("secret"), 503, False),
        (QuotaExceeded("tenant search has 3 jobs", tenant="search", limit="jobs", most=3, used=3), 429, True),
        (SettingsError("dimensions 3"), 400, True),
        (InputError("text 3"), 400, True),
    ],
)
def test_callers_hear_what_is_about_their_request(error: EmbedctlError, status: int, told: bool) -> None:
    refusal = refusal_of(error)
    assert (refusal.status, refusal.message == str(error)) == (status, told)
    assert ("retry-after" in refusal.headers) == (status in (429, 503))
