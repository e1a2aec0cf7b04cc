"""What the gateway counts: requests, bytes, tokens; and what its callers hear."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from embedctl.store.connection import Connection
from embedctl.store.ledger import Ledger
from embedctl_config.errors import (
    BrokerFull,
    BrokerUnavailable,
    EmbedctlError,
    InputError,
    JobLost,
    NotPermitted,
    QuotaExceeded,
    SettingsError,
    WaitTimeout,
)
from embedctl_config.outputs import Output
from embedctl_config.settings import Settings
from embedctl_gateway.access.admission import Admission, Held
from embedctl_gateway.calls.common import MAX_TOKENS, check_sizes
from embedctl_gateway.embedding.catalogue import Served
from embedctl_gateway.embedding.embedder import Asked
from embedctl_gateway.http.refusals import Refusal, as_tei, refusal_of


def test_a_missing_extra_is_named() -> None:
    start = "from embedctl_gateway.__main__ import main; main(['--address', '0'])"
    code = f"import sys; sys.modules['starlette'] = None; {start}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    told = "`embedctl gateway` needs an optional dependency: pip install 'embedctl[gateway]'"
    assert (done.returncode, done.stderr.strip()) == (1, f"embedctl gateway: {told}")


#: What is about this process alone asks no Redis.
NOWHERE = Connection(Settings(redis_url="unix:///nonexistent/redis.sock"))


def held_by(admission: Admission, client: str) -> Held:
    held = Held(admission)
    held.client = client
    return held


def test_bytes_are_bounded_but_one_request_may_have_more() -> None:
    admission = Admission(Ledger(NOWHERE), 2, max_bytes=100)
    large, small = held_by(admission, "a"), held_by(admission, "b")
    large.hold(80)
    large.hold(80)  # nobody else has any
    with pytest.raises(Refusal) as refused:
        small.hold(1)
    assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "1")
    assert admission.held == 160
    large.free()
    assert (admission.held, admission.of_client) == (0, {})


def test_each_client_has_as_many_bytes_as_are_free() -> None:
    admission = Admission(Ledger(NOWHERE), 2, max_bytes=6400)
    many = [held_by(admission, "a") for _ in range(5)]
    for each in many[:-1]:
        each.hold(800)
    with pytest.raises(Refusal):
        many[-1].hold(1)  # small by itself, but not its client
    other = held_by(admission, "b")
    other.hold(1600)
    with pytest.raises(Refusal):
        other.hold(1)
    many[0].hold(-800)
    other.hold(1)
    for each in (*many, other):
        each.free()
    assert (admission.held, admission.of_client) == (0, {})


def test_tokens_are_estimated_up_to_those_that_the_model_takes() -> None:
    short, long = "word " * 100, "word " * 100_000
    served = Served("m", "fp32", 16, 256, "")
    check_sizes(Asked([long] * 1000), served)  # 256,000 tokens are encoded
    with pytest.raises(Refusal):
        check_sizes(Asked([long] * 3, long="mean"), served)
    for texts, most in (([long] * 2000, 256), ([long] * 3, 0), ([short] * 2600, 0)):
        with pytest.raises(Refusal) as refused:
            check_sizes(Asked(texts), Served("m", "fp32", 16, most, ""))
        assert (refused.value.code, f"{MAX_TOKENS:,}" in refused.value.message) == ("max_tokens_per_request", True)


def test_a_model_is_asked_for_what_it_gives() -> None:
    splade, plain = Served("m", "fp32", 0, 256, "", outputs=("sparse",)), Served("m", "fp32", 16, 256, "")
    sparse, either = Asked(["a"], outputs=(Output.SPARSE,)), Asked(["a"], outputs=(Output.DENSE, Output.MULTI))
    check_sizes(sparse, splade)
    for asked, served, lacking in (
        (Asked(["a"], dimensions=4), splade, "dense"),
        (sparse, plain, "sparse"),
        (either, splade, "dense"),
    ):
        with pytest.raises(Refusal, match=rf"m gives no {lacking} vectors, but {served.outputs[0]}$") as refused:
            check_sizes(asked, served)
        assert (refused.value.status, as_tei(refused.value).status_code) == (400, 424)
    colbert = Served("m", "fp32", 0, 512, "", outputs=("multi",), multi_width=1024)
    check_sizes(replace(either, texts=["word " * 512] * 32), colbert)
    for asked, code in (
        (replace(either, texts=["word " * 512] * 33), "max_tokens_per_request"),  # 64 MiB of numbers
        (replace(either, dimensions=4), "invalid_value"),
    ):
        with pytest.raises(Refusal) as refused:
            check_sizes(asked, colbert)
        assert refused.value.code == code


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (BrokerUnavailable("at redis://secret"), 503, False),
        (BrokerFull("Redis is full (1 byte)"), 503, True),
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
