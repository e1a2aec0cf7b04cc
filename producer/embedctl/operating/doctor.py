"""Checks everything that a job depends on, and says how to fix what is wrong; and where the project verified the
hardware classes, for README's table too."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from embedctl.chunk_files import ChunkFiles, Where
from embedctl.queueing.broker import Broker
from embedctl.queueing.routing import redis_full, start_command
from embedctl.store.connection import OLDEST_REDIS, mode_of
from embedctl.store.quotas import Quota
from embedctl.store.sentinels import Seen, ask
from embedctl_config import wire
from embedctl_config.cpu import bf16_unit, no_bf16
from embedctl_config.errors import BrokerRefused, BrokerUnavailable, EmbedctlError, NotPermitted
from embedctl_config.extras import installed
from embedctl_config.hardware import SHIPPED_CLASSES, HardwareClass
from embedctl_config.redis_url import sentinels_of
from embedctl_config.settings import Settings
from embedctl_config.tenants import TenantEntry
from embedctl_config.wire import ChunkInput

_IN_CI = "verified in CI"
_NOT = "not verified on hardware"
_OWN = "your own class, not verified by the project"

#: Class → statement. A class that the project has run on its device names the device and the day, such as `verified on
#: an H200 on 2026-12-31`. A run with a stand-in for a device or a vendor's library verifies nothing.
VERIFIED: Mapping[str, str] = {
    "cpu": _IN_CI,
    "cpu-bf16": "verified on an AMD EPYC Zen 5 on 2026-11-24",
    "cpu-int8": _IN_CI,
    "gpu": "verified on an NVIDIA H200 on 2026-11-26",
    "gpu-tensorrt": _NOT,
    "neuron": _NOT,
}
#: The largest share of a machine's memory for Redis.
LARGEST_SHARE = 0.6
#: The largest share of Redis' maxclients in everyday use: a restart of all workers needs more connections.
LARGEST_SHARE_OF_CLIENTS = 0.7
#: Fewest sentinels of which most still agree when one is away.
_FEWEST_SENTINELS = 3
#: Most tenants whose limits are shown.
_MOST_TENANTS = 1_000
#: Most connections that a worker holds.
CLIENTS_OF_A_WORKER = 10

#: What is put into the place of chunks: more than stays in Redis (bytes).
_PROBE_BYTES = 1024 * 1024
_NVIDIA = "NVIDIA GPUs"
#: The extras of one purpose each; `embedctl[extra]` installs one.
EXTRAS = (
    "torch",
    "onnx",
    "tensorrt",
    "neuron",
    "parquet",
    "pgvector",
    "qdrant",
    "lancedb",
    "s3",
    "minilm",
    "local",
    "bench",
    "flower",
    "metrics",
    "gateway",
)
_AGAIN = "install embedctl again with pip, without --no-deps: a package that it always needs is missing or too old"
_DEVICES = Path("/dev")
#: AMD's driver numbers its GPUs here; CPUs are 0.
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
#: The id of a job that never existed, for bytes that are put and removed again.
_NO_JOB = "20000101-000000-0000000000"
_LAZY = ("lazyfree-lazy-eviction", "lazyfree-lazy-expire", "lazyfree-lazy-server-del")


def is_verified(name: str, entry: HardwareClass) -> bool:
    """Whether the project has run this class on its device, with the configuration that it has here."""
    return statement_of(name, entry) not in (_NOT, _OWN)


def statement_of(name: str, entry: HardwareClass) -> str:
    """The verification of a class, shipped or not, with the configuration that it has here."""
    shipped = SHIPPED_CLASSES.get(name)
    same = shipped is not None and (entry.device, entry.backend) == (shipped.device, shipped.backend)
    return VERIFIED[name] if same else _OWN


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its subject, what was found, and how to fix it."""

    level: Level
    subject: str
    found: str
    remedy: str = ""


def examine(settings: Settings) -> Iterator[Finding]:
    """Check the extras, the devices, the classes, Redis and the workers, and yield one finding after the other."""
    yield from extra_findings()
    accelerators = _accelerators()
    yield from _devices(accelerators)
    yield from class_findings(settings.classes, {kind for kind, _, _ in accelerators})
    if settings.url:
        yield gateway_finding(settings)
        return
    if not settings.redis_url:
        yield Finding(
            Level.WARN,
            "redis",
            "none is configured: only `embedctl run` and `embedctl up` work, with a private Redis",
            "set EMBEDCTL_REDIS_URL to share jobs between machines",
        )
        return
    broker = Broker.connect(settings)
    try:
        if (sentinels := sentinels_of(settings)) is not None:
            yield sentinel_finding(ask(sentinels), sentinels.master)
        info, config = broker.connection.server()
        yield from redis_findings(info, config, _memory_bytes())
        if settings.chunk_files:
            yield chunk_files_finding(broker.chunk_files, settings.chunk_files)
        if not _is_cluster(info):
            yield from _workers(broker)
            yield from limit_findings(settings.tenants, broker.quotas.all(_MOST_TENANTS))
    except BrokerRefused as error:
        yield Finding(Level.FAIL, "redis", str(error), "give embedctl its own database, and connect without a proxy")
    except BrokerUnavailable as error:
        yield Finding(Level.FAIL, "redis", str(error), "start Redis, or correct EMBEDCTL_REDIS_URL")
    finally:
        broker.close()


def gateway_finding(settings: Settings) -> Finding:
    """Whether the gateway in Redis' place takes this process' key."""
    from embedctl.remote.calls import Calls  # here, because every command would pay for orjson

    try:
        served = [model["id"] for model in Calls(settings).ask("GET", "models").fields["data"]]
    except (BrokerUnavailable, NotPermitted) as error:
        return Finding(Level.FAIL, "gateway", str(error), "correct EMBEDCTL_URL or EMBEDCTL_API_KEY_FILE")
    if not served:
        return Finding(Level.WARN, "gateway", f"{settings.url} answers, and no live worker serves a model")
    return Finding(Level.OK, "gateway", f"{settings.url} answers, and serves {', '.join(served)}")


def sentinel_finding(seen: Seen, name: str) -> Finding:
    found = f"{seen.answering} of {seen.asked} sentinels answer"
    if seen.refusing:
        found += f", and {seen.refusing} refuse{'s' if seen.refusing == 1 else ''} the password, or ask for one"
        return Finding(Level.FAIL, "sentinels", found, "set sentinel_password_file to a file that holds the password")
    if not seen.master:
        return Finding(Level.FAIL, "sentinels", f"{found}, and name no master {name}", "correct EMBEDCTL_REDIS_URL")
    found += f"; {seen.master} is the master, with {seen.replicas} replica{'' if seen.replicas == 1 else 's'}"
    few = seen.answering < seen.asked or seen.asked < _FEWEST_SENTINELS or not seen.replicas
    remedy = "run three sentinels or more, each on a machine of its own, and a replica" if few else ""
    return Finding(Level.WARN if few else Level.OK, "sentinels", found, remedy)


def chunk_files_finding(files: ChunkFiles, address: str) -> Finding:
    """Judge the place of chunks outside of Redis, by putting bytes there and getting them back."""
    try:
        place = files.make_place()
        payload = wire.encode_input(ChunkInput(0, bytes(1), [bytes(_PROBE_BYTES)]))
        began = time.monotonic()
        value = files.put(Where(_NO_JOB, "in", 0), payload)
        if files.get(value) != payload:
            return Finding(Level.FAIL, "chunk_files", f"{address} gives back other bytes", "use another place")
        took_s = time.monotonic() - began
        files.delete([value])
    except (EmbedctlError, OSError) as error:
        return Finding(Level.FAIL, "chunk_files", str(error), "docs/operations.md: chunks outside of Redis")
    return Finding(Level.OK, "chunk_files", f"{address}, place {place}; 1 MiB put and got in {1000 * took_s:.0f} ms")


def redis_findings(info: Mapping[str, Any], config: Mapping[str, str], machine_bytes: int) -> Iterator[Finding]:
    """Judge a Redis by its INFO and its CONFIG, and by the memory of this machine: in small deployments, Redis runs on
    it."""
    version = str(info["redis_version"])
    old = tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS
    yield _judge(not old, Level.FAIL, "redis version", version, "upgrade Redis to 6.2 or newer")
    yield _judge(
        not _is_cluster(info),
        Level.FAIL,
        "redis mode",
        mode_of(info),
        "use an instance without cluster mode (cluster-enabled no): a cluster spreads the keys of a job over nodes",
    )
    yield from _connections(info, config)
    if config:
        yield from _settings_alone(config)
    else:
        yield Finding(Level.OK, "redis settings", "only some are checked: this user may not run CONFIG GET")
        config = _settings_in(info)
    yield _judge(
        config.get("appendonly") == "yes",
        Level.WARN,
        "persistence",
        ", ".join(f"{name} {config[name]}" for name in ("appendonly", "appendfsync") if name in config),
        "appendonly yes: without it a restart of Redis loses every job",
    )
    yield _judge(
        config.get("maxmemory-policy") == "noeviction",
        Level.FAIL,
        "eviction",
        f"maxmemory-policy {config.get('maxmemory-policy')}",
        "maxmemory-policy noeviction: any other forgets texts and vectors",
    )
    yield _memory(int(config.get("maxmemory") or 0), int(info["used_memory"]), machine_bytes)


def _memory(limit: int, used: int, machine_bytes: int) -> Finding:
    share = limit / machine_bytes
    return _judge(
        0 < share <= LARGEST_SHARE,
        Level.WARN,
        "memory",
        f"maxmemory {limit:,} bytes, {share:.0%} of this machine's; {used:,} used"
        if limit
        else f"maxmemory is not set; {used:,} bytes used",
        f"maxmemory below {LARGEST_SHARE:.0%} of the machine ({int(machine_bytes * LARGEST_SHARE):,}): saving and "
        "rewriting need the rest",
    )


def _is_cluster(info: Mapping[str, Any]) -> bool:
    return mode_of(info) == "cluster" or info.get("cluster_enabled") == 1


def _connections(info: Mapping[str, Any], config: Mapping[str, str]) -> Iterator[Finding]:
    """Judge how close the number of clients is to maxclients, which only Redis 7 or CONFIG tells."""
    most, now = int(info.get("maxclients") or config.get("maxclients") or 0), int(info.get("connected_clients", 0))
    if most:
        yield _judge(
            now <= most * LARGEST_SHARE_OF_CLIENTS,
            Level.WARN,
            "connections",
            f"{now:,} of {most:,} (maxclients)",
            "raise maxclients, and the number of files that Redis may open: a worker holds up to "
            f"{CLIENTS_OF_A_WORKER} connections, and Redis refuses clients beyond maxclients",
        )


def _settings_in(info: Mapping[str, Any]) -> dict[str, str]:
    return {
        "appendonly": "yes" if info["aof_enabled"] else "no",
        "maxmemory": str(info["maxmemory"]),
        "maxmemory-policy": str(info["maxmemory_policy"]),
    }


def _settings_alone(config: Mapping[str, str]) -> Iterator[Finding]:
    yield _judge(
        config.get("auto-aof-rewrite-percentage") != "0",
        Level.WARN,
        "AOF rewrite",
        f"at {config.get('auto-aof-rewrite-percentage')} % growth",
        "auto-aof-rewrite-percentage 100: otherwise the file grows without limit",
    )
    eager = [name for name in _LAZY if config.get(name) != "yes"]
    yield _judge(
        not eager,
        Level.WARN,
        "lazy freeing",
        f"off: {', '.join(eager)}" if eager else "on",
        "set them to yes: otherwise, freeing a large value stalls all clients",
    )


def extra_findings() -> Iterator[Finding]:
    """Judge what embedctl always needs, and each extra, by all that their metadata declares."""
    try:
        always = installed()
    except metadata.PackageNotFoundError:
        yield Finding(Level.WARN, "packages", "embedctl is not installed by pip, so its packages can't be judged")
        return
    except ModuleNotFoundError as error:  # what reads the metadata
        yield Finding(Level.FAIL, "packages", f"no {error.name}", _AGAIN)
        return
    yield _judge(not always.lacking, Level.FAIL, "packages", ", ".join(always.lacking or always.present), _AGAIN)
    for extra in EXTRAS:
        here = installed(extra)
        # A missing extra is not a fault: a producer needs none of them.
        remedy = f"pip install 'embedctl[{extra}]' if this machine needs it" if here.lacking else ""
        yield Finding(Level.OK, f"extra {extra}", ", ".join([*here.lacking, *here.present]), remedy)


def class_findings(classes: Mapping[str, HardwareClass], accelerators: Collection[str]) -> Iterator[Finding]:
    """Report for each hardware class whether it is verified, whether its device is here, and what this CPU has for it.
    `accelerators` are the kinds of devices on this machine, other than CPUs."""
    for name, entry in classes.items():
        here = entry.device == "cpu" or entry.device in accelerators
        statement = "; ".join(filter(None, (statement_of(name, entry), _on_this_cpu(entry))))
        remedy = f"embedctl model verify MODEL --class {name} tries it on this machine"
        yield Finding(
            Level.OK,
            f"class {name}",
            statement if here else f"{statement}; no device of kind {entry.device} is seen here",
            remedy if here and not is_verified(name, entry) else "",
        )


def _on_this_cpu(entry: HardwareClass) -> str:
    """What this CPU has for a class; empty if nothing depends on it."""
    unit = bf16_unit()
    if entry.backend == "torch-bf16":
        return f"this CPU has {unit}" if unit else no_bf16()
    if entry.backend == "int8" and unit == "AMX":
        return "this CPU has AMX: class cpu-bf16 is about as fast here and far more accurate"
    return ""


def _devices(accelerators: Sequence[tuple[str, str, int]]) -> Iterator[Finding]:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(Level.OK, "CPUs", f"{cpus} usable by this process")
    for _, name, count in accelerators:
        # Workers ask the driver for them through this package of NVIDIA's.
        lacking = name == _NVIDIA and find_spec("pynvml") is None
        remedy = "workers here find them with nvidia-ml-py: pip install 'embedctl[gpu]'" if lacking else ""
        yield Finding(Level.OK, name, str(count), remedy)


def _accelerators() -> list[tuple[str, str, int]]:
    """Kind, name and number of the accelerators that the kernel shows, even if this user may not open them."""
    counted = [
        ("gpu", _NVIDIA, len(list(_DEVICES.glob("nvidia[0-9]*")))),
        ("gpu", "AMD GPUs", sum(map(_is_gpu, _AMD_NODES.glob("*/gpu_id")))),
        ("neuron", "Neuron devices", len(list(_DEVICES.glob("neuron[0-9]*")))),
    ]
    return [each for each in counted if each[2]]


def _is_gpu(node: Path) -> bool:
    try:
        return node.read_text(encoding="ascii").strip() != "0"
    except OSError:  # it belongs to another container
        return False


def _workers(broker: Broker) -> Iterator[Finding]:
    if full := broker.connection.full_bytes():
        yield Finding(Level.FAIL, "workers", redis_full(full), "they are seen again once there is room")
        return
    now_ms = broker.connection.about_now_ms()
    rows = list(broker.workers.alive())
    alive = Counter((row.hardware, model) for row in rows for model in row.loaded)
    for (hardware, model), count in sorted(alive.items()):
        yield Finding(Level.OK, "workers", f"{count} live for {model} on {hardware}")
    for row in rows:
        if row.activity == "hung":
            found = f"{row.name} has finished no batch for {row.quiet_s:.0f} s"
            yield Finding(
                Level.WARN, "hung worker", found, f"it ends itself after hang_s ({broker.settings.hang_s:g} s)"
            )
    for gone in broker.workers.gone():
        found = f"{gone.worker.name} has been gone for {gone.seconds:.0f} s: {gone.how}"
        yield Finding(Level.WARN, "worker gone", found, "look at its log; start it again")
    starting = broker.workers.not_ready.all()
    for each in starting:
        yield Finding(Level.WARN, "worker not ready", f"{each.name}: {each.words(now_ms)}", "its log says more")
    if not (alive or starting):
        yield Finding(Level.WARN, "workers", "none is alive", start_command("cpu", broker.settings.model))


def limit_findings(tenants: Mapping[str, TenantEntry], quotas: Sequence[Quota]) -> Iterator[Finding]:
    """Report for each tenant with limits what it has of them, and whether they are those of these settings."""
    known = {quota.tenant: quota for quota in quotas}
    for name in sorted({*known, *tenants}):
        quota = known.get(name, Quota(name, "", {}, {}))
        own = tenants.get(name)
        here = quota.limits if own is None else {limit: most for limit, most in own.limits.items() if most}
        found = ", ".join(
            f"{quota.used[limit]:,} of {most:,} ({limit})" if limit in quota.used else f"at most {most:,} ({limit})"
            for limit, most in quota.limits.items()
        )
        if here != quota.limits:
            says = ", ".join(f"{limit} {most:,}" for limit, most in here.items()) or "no limits"
            yield Finding(
                Level.WARN,
                f"tenant {name}",
                f"{found or 'no limits'}{quota.by and f', of worker {quota.by}'}; the settings here say: {says}",
                "give all workers the same settings, and start them again: the one that was started last decides",
            )
        elif found:
            room = all(quota.used.get(limit, 0) < most for limit, most in quota.limits.items())
            remedy = "its new jobs are refused until some are done"
            yield _judge(room, Level.WARN, f"tenant {name}", f"{found}, of worker {quota.by}", remedy)


def _judge(good: bool, otherwise: Level, subject: str, found: str, remedy: str) -> Finding:
    return Finding(Level.OK, subject, found) if good else Finding(otherwise, subject, found, remedy)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
