"""The results of `embedctl model tune` for a model on this machine, and what needs no tuning."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from embedctl_config.cpu import cpu_identity
from embedctl_config.hardware import HardwareClass
from embedctl_workers.machine.devices import Accelerator
from embedctl_workers.models.cache import keep, noted, path_of

log = logging.getLogger(__name__)

#: The folder of the cache.
_KIND = "tuned"

#: Tokens of a batch on a CPU: within 5 % of the best for every model and CPU that was measured.
DEFAULT_TOKEN_BUDGET = 1024
#: What a padded batch costs on CPUs beside its rows × longest row, in tokens. A line through the times of batches of 8
#: to 1,024 tokens with onnxruntime (all-MiniLM-L6-v2 and bge-small's shape, fp32 and int8) begins at 21 to 29 with a
#: thread, at 31 to 46 with two.
PADDED_BATCH_COST = 32


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found for a model and a hardware class on this kind of CPU and, if one is needed, of GPU."""

    #: how many workers share the CPUs or the GPU, and how many compute threads each has
    workers: int
    threads: int
    cpus: int  #: how many CPUs the workers shared
    tokens_per_s: float  #: of all workers together


def advised_workers(
    hardware: HardwareClass, fingerprint: str, *, cpus: int, cache: Path, accelerator: Accelerator | None = None
) -> int:
    """The best number of workers on this number of CPUs, and on an accelerator of this kind; 1 if it was not tuned."""
    tuned = load_tuned(hardware, fingerprint, cache, accelerator)
    return tuned.workers if tuned and tuned.cpus == cpus else 1


def load_tuned(
    hardware: HardwareClass, fingerprint: str, cache: Path, accelerator: Accelerator | None = None
) -> Tuned | None:
    """What was saved for this model, class and kind of device; None if nothing was, or it can't be read or trusted."""
    facts = _facts(hardware, fingerprint, accelerator)
    found = noted(cache, _KIND, facts)
    if found is None:
        return None
    try:
        tuned = Tuned(**found)
        if type(tuned.workers) is not int or not 1 <= tuned.workers <= tuned.cpus:
            raise ValueError(f"workers is {tuned.workers!r}, cpus {tuned.cpus!r}")  # noqa: TRY301  (as for other faults)
    except (ValueError, TypeError) as error:
        log.warning("what was tuned can't be read, so defaults hold: %s: %s", path_of(cache, _KIND, facts), error)
        return None
    return tuned


def save_tuned(
    tuned: Tuned, hardware: HardwareClass, fingerprint: str, cache: Path, accelerator: Accelerator | None = None
) -> Path:
    """Keep what was found, and return its file; raises as :func:`~embedctl_workers.models.cache.keep`."""
    path = path_of(cache, _KIND, _facts(hardware, fingerprint, accelerator))
    keep(path, json.dumps(asdict(tuned)).encode())
    return path


def _facts(hardware: HardwareClass, fingerprint: str, accelerator: Accelerator | None) -> list[object]:
    facts: list[object] = [cpu_identity(), fingerprint, hardware.backend, dict(hardware.options)]
    if accelerator is not None:
        facts += [accelerator.kind, accelerator.name or accelerator.uid, accelerator.memory]
    return facts
