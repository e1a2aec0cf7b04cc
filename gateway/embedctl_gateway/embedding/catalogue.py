"""The models that live workers serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embedctl.common.daemons import for_nobody
from embedctl.queueing.broker import Broker
from embedctl.queueing.listening import in_shared_thread
from embedctl.queueing.routing import near_models, redis_full
from embedctl.store.connection import answers_by
from embedctl.store.workers import OFFERS_S
from embedctl_config import keys
from embedctl_config.hardware import PRECISIONS
from embedctl_config.model_names import did_you_mean
from embedctl_config.outputs import PLAIN
from embedctl_config.settings import Settings, check_model_name
from embedctl_gateway.http.refusals import Refusal, invalid, unavailable

#: A Redis that does not answer for so long counts as away (seconds).
LOOK_S = 5.0
#: What is known is renewed after this (seconds), while requests go on with it.
_RENEWED_S = OFFERS_S / 2


@dataclass(frozen=True, slots=True)
class Served:
    """A model that live workers serve: in which precision, the most accurate one, and of how many dimensions. Texts
    longer than `max_tokens` are truncated; 0 if the model has no limit, or no worker says so. `spelling_of` is the
    model's name, if this one is another spelling of it; else empty. `matryoshka`: whether vectors can be cut.
    `outputs`: what it gives of a text, with `multi_width` dimensions of each vector of a multi-vector.
    `pooling`: how it makes them of tokens' states; empty if nobody says. `prompts`: the names of its prompts; None if
    nobody says."""

    name: str
    precision: str
    dim: int
    max_tokens: int
    spelling_of: str
    matryoshka: bool = True
    outputs: Sequence[str] = PLAIN
    multi_width: int = 0
    pooling: str = ""
    prompts: frozenset[str] | None = None


class Catalogue:
    """Asks Redis what workers offer, once for all requests of a second."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._broker = Broker.shared(settings)
        self._known: Mapping[str, Served] = {}
        self._known_at = -OFFERS_S
        self._looking: asyncio.Task[Mapping[str, Served]] | None = None

    async def served(self) -> Mapping[str, Served]:
        """The models by name, other spellings included. Raises Refusal if Redis does not answer, or is full, so that
        no worker is seen, and BrokerUnavailable if it can't be reached."""
        age_s = time.monotonic() - self._known_at
        if self._known and age_s < _RENEWED_S:
            return self._known
        if self._looking is None:
            self._looking = asyncio.create_task(in_shared_thread(self._look), context=for_nobody())
            self._looking.add_done_callback(self._looked)
        if self._known and age_s < OFFERS_S:
            return self._known
        try:
            async with asyncio.timeout(LOOK_S):
                return await asyncio.shield(self._looking)  # others wait for it too
        except TimeoutError:
            raise unavailable("the queue does not answer") from None

    async def find(self, name: str | None) -> Served:
        """A model; the setting's, or the only one, if the caller names none. Raises Refusal if no live worker serves
        it, and as :meth:`served`."""
        served = await self.served()
        if name is None:
            return self._default(served)
        if name not in served:
            raise await in_shared_thread(lambda: self._missing(name))
        return served[name]

    def _looked(self, task: asyncio.Task[Mapping[str, Served]]) -> None:
        self._looking = None
        if not task.cancelled() and task.exception() is None:
            self._known, self._known_at = task.result(), time.monotonic()

    def _look(self) -> Mapping[str, Served]:
        with answers_by(time.monotonic() + LOOK_S):
            offers = self._broker.workers.offers(early_s=OFFERS_S - _RENEWED_S)  # what makes jobs asks for them too
        found: dict[str, Served] = {}
        for (hardware, name, precision), offer in sorted(offers.items()):
            if not self._takes(hardware):
                continue
            one = Served(
                name,
                precision,
                offer.dim,
                offer.max_tokens,
                offer.spelling_of,
                offer.matryoshka,
                offer.outputs,
                offer.multi_width,
                offer.pooling,
                offer.prompts,
            )
            if name not in found or _rank(one) < _rank(found[name]):
                found[name] = one
        if not found and (full := self._broker.connection.full_bytes()):
            raise unavailable(redis_full(full), "broker_full")
        return found

    def _takes(self, hardware: str) -> bool:
        chosen = self._settings.hardware
        return hardware in self._settings.classes if chosen == "auto" else hardware == chosen

    def _default(self, served: Mapping[str, Served]) -> Served:
        names = [name for name, each in served.items() if not each.spelling_of]
        if self._settings.model in served:
            return served[self._settings.model]
        if len(names) == 1:
            return served[names[0]]
        if not names:
            raise unavailable("no live worker serves a model")
        raise invalid(f"name a model: {', '.join(names)}", "missing_required_parameter", "model")

    def _missing(self, name: str) -> Refusal:
        """The refusal of a model that no live worker serves: for now, if one did lately, or it is the settings'."""
        if check_model_name(name):
            return invalid("no model has such a name", "model_not_found", "model", 404)
        workers = self._broker.workers
        queues = [keys.queue(each, name) for each in self._settings.classes if self._takes(each)]
        if name == self._settings.model or name in self._settings.models or workers.served_lately(queues):
            return unavailable(f"no live worker serves the model {name} now", "model_unavailable")
        near = near_models(workers.offers(), name)
        hint = f". {did_you_mean(near)}" if near else ""
        return invalid(f"no live worker serves a model {name}{hint}", "model_not_found", "model", 404)


def _rank(served: Served) -> int:
    return PRECISIONS.index(served.precision) if served.precision in PRECISIONS else len(PRECISIONS)
