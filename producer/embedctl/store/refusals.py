"""Why Redis does not answer as it should: errors of redis-py as errors of ours, which say what to do."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator

import redis
from redis.exceptions import OutOfMemoryError

from embedctl.store.sentinels import refuse
from embedctl_config.errors import BrokerFull, BrokerRefused, BrokerUnavailable, NotPermitted

#: What people do about a full Redis.
MAKE_ROOM = "discard old jobs (`embedctl list`, `embedctl discard`), or raise its maxmemory"
#: The errors of Redis 6.2 and 7 if the access list denies a command inside a script. redis-py has no class for them.
_REFUSED_IN_SCRIPT = re.compile("The user executing the script|ACL failure in script")
#: The error codes of an instance that can't answer now. It may be ready soon, or its name may lead to another instance.
#: In a script's error, the code is in the middle.
_NOT_NOW = re.compile(
    r"(?:^|[\s-])(?:READONLY|MASTERDOWN|UNBLOCKED|LOADING|NOREPLICAS|NOMASTERLINK|MISCONF|BUSY|TRYAGAIN)\b"
)
_NOT_NOW_CLASSES = (redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError, redis.exceptions.TryAgainError)
#: The errors of a cluster. redis-py omits the codes of the errors that it has a class for.
_CLUSTER = re.compile("CROSSSLOT|CLUSTERDOWN|non local key in a cluster|accessing a non local key|access keys .* slot")
_CLUSTER_CLASSES = (
    redis.exceptions.ClusterCrossSlotError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.AskError,
)
#: The end of what redis-py puts before a pipeline's error, together with the command and its arguments.
_IN_PIPELINE = "of pipeline caused error: "
#: What is said of a port with TLS when it is asked without, and of a port without TLS when it is asked with it.
_HAS_TLS = re.compile("Connection closed by server|Connection reset by peer")
NO_HANDSHAKE = "handshake operation timed out"
_HAS_NO_TLS = re.compile(f"WRONG_VERSION_NUMBER|UNEXPECTED_EOF|RECORD_LAYER_FAILURE|{NO_HANDSHAKE}")


def is_full(error: BaseException) -> bool:
    """Whether Redis has reached its maxmemory. redis-py does not recognise this error inside a script."""
    return isinstance(error, OutOfMemoryError) or "OOM command not allowed" in str(error)


def explained(
    error: Exception, url: str, *, has_answered: bool, maxmemory: int = 0
) -> BrokerUnavailable | NotPermitted:
    """One of our errors for an error of redis-py.

    Args:
        url: that of Redis, as it is shown. A full one is named without it, for clients of a gateway too.
        has_answered: whether it has answered before, so that the URL's scheme is right.
        maxmemory: Redis' limit on its memory (bytes); 0 if it is unknown.
    """
    if refuse(error):
        return BrokerUnavailable(
            f"the sentinels of Redis at {url} refuse the password, or ask for one: set "
            "sentinel_password_file to a file that holds it"
        )
    if isinstance(error, redis.exceptions.AuthenticationError):
        return BrokerUnavailable(f"Redis at {url} refuses the user or the password: {error}")
    if is_full(error):
        return BrokerFull(f"Redis is full{f' ({maxmemory:,} bytes)' * bool(maxmemory)}: {MAKE_ROOM}")
    if isinstance(error, redis.exceptions.NoPermissionError) or _REFUSED_IN_SCRIPT.search(str(error)):
        return NotPermitted(
            f"Redis at {url} does not let its user do this: {error}. docs/security.md says which user "
            "may; `embedctl config acl` makes the access list"
        )
    if isinstance(error, redis.exceptions.ResponseError):
        return _refused(error, url)
    if distrust := _distrust(error):
        return BrokerUnavailable(
            f"Redis at {url} is not to be trusted: {distrust}. Set tls_ca_file to the certificate of "
            "the authority that signed its certificate, and write the host in redis_url as its certificate does"
        )
    # Where sentinels were asked, redis-py describes its objects after this mark.
    reason = str(error).partition(" : <redis.")[0].rstrip(".")
    advice = "" if has_answered else _scheme_advice(url, error)
    return BrokerUnavailable(
        f"Redis at {url} can't be reached: {reason}. Does it run, and is EMBEDCTL_REDIS_URL right?" + advice
    )


def _refused(error: redis.exceptions.ResponseError, url: str) -> BrokerUnavailable:
    reason = _reason(error)
    if not isinstance(error, redis.exceptions.MasterDownError) and (
        isinstance(error, _CLUSTER_CLASSES) or _CLUSTER.search(reason)
    ):
        return is_cluster(url, reason)
    if is_not_now(error):
        return BrokerUnavailable(
            f"Redis at {url} does not do this now: {reason}. Does EMBEDCTL_REDIS_URL name the master?"
        )
    return BrokerRefused(
        f"Redis at {url} refuses a command, and would each time: {reason}. Has another program "
        "written embedctl's keys? docs/troubleshooting.md says more"
    )


def is_cluster(url: str, reason: str) -> BrokerRefused:
    """The error for a Redis that is a cluster."""
    return BrokerRefused(
        f"Redis at {url} is a cluster ({reason}), which spreads the keys of a job over nodes: use an "
        "instance without cluster mode (cluster-enabled no)"
    )


def _reason(error: Exception) -> str:
    """Redis' own message, without redis-py's prefix."""
    return str(error).rpartition(_IN_PIPELINE)[2].rstrip(".")


def is_not_now(error: Exception) -> bool:
    """Whether Redis answers, and can't do this now."""
    return isinstance(error, redis.exceptions.ResponseError) and (
        isinstance(error, _NOT_NOW_CLASSES) or _NOT_NOW.search(_reason(error)) is not None
    )


def _distrust(error: BaseException) -> str:
    """What is wrong with the certificate, if that caused the error; otherwise empty."""
    refused = next((each for each in _causes(error) if isinstance(each, ssl.SSLCertVerificationError)), None)
    return "" if refused is None else refused.verify_message.rstrip(".")


def _scheme_advice(url: str, error: Exception) -> str:
    """The scheme to try, if the error looks as if the URL had the wrong one; otherwise empty."""
    said = all_said(error)
    if url.startswith("redis:") and _HAS_TLS.search(said):
        return " If this port speaks TLS, write rediss:// (with two s) in EMBEDCTL_REDIS_URL"
    if url.startswith("rediss:") and _HAS_NO_TLS.search(said):
        return " If this port does not speak TLS, write redis:// (with one s) in EMBEDCTL_REDIS_URL"
    return ""


def all_said(error: BaseException) -> str:
    """The messages of an error, and of those that it came of."""
    return " ".join(map(str, _causes(error)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
