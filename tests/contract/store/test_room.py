"""Who gets the room of all gateways: each tenant its share, when it is short, through whichever gateway it asks."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from redis import Redis

from embedctl import enqueue_embeddings
from embedctl.queueing.broker import Broker
from embedctl.store.ledger import Ledger, NoRoom, Room, Taking, taken_with_job
from embedctl_config import keys
from embedctl_config.errors import BrokerUnavailable
from embedctl_config.settings import Settings
from tests.support.store import new_job

SUMS = keys.ledger("sums")


class Places:
    """Two gateways on one Redis, and requests that have places until they are told to end."""

    def __init__(self, broker: Broker, raw: Redis, most: int) -> None:
        self.room = Room("places", most)
        self.gateways = [Ledger(broker.connection), Ledger(broker.connection)]
        self.raw = raw
        self._open: list[tuple[str, Taking]] = []

    def ask(self, tenant: str) -> bool:
        """Ask the gateways in turn."""
        ledger = self.gateways[len(self._open) % 2]
        try:
            taking = ledger.take(tenant, {self.room: 1})
        except NoRoom:
            return False
        self._open.append((tenant, taking))
        return True

    def ask_all(self, tenant: str) -> int:
        """As many as it gets."""
        return sum(iter(lambda: self.ask(tenant), False))

    def end(self, tenant: str) -> None:
        self._end(next(at for at, (whose, _) in enumerate(self._open) if whose == tenant))

    def end_any(self, chance: random.Random) -> None:
        self._end(chance.randrange(len(self._open)))

    def _end(self, at: int) -> None:
        self._open.pop(at)[1].give()
        for ledger in self.gateways:
            ledger.tell()

    def pass_s(self, seconds: int) -> None:
        for _ in range(0, seconds, keys.CLOCK_STEP_S):
            self.raw.hincrby(keys.CLOCK, "redis", -keys.CLOCK_STEP_S * 1000)
            self.gateways[0].take("nobody", {})

    @property
    def had(self) -> Counter[str]:
        return Counter(tenant for tenant, _ in self._open)


def test_a_newcomer_gets_the_place_that_comes_free_and_not_who_had_it(broker: Broker, raw: Redis) -> None:
    places = Places(broker, raw, 4)
    assert places.ask_all("a") == 4
    assert not places.ask("b")
    for _ in range(2):
        places.end("a")
        assert not places.ask("a")
        assert places.ask("b")
    places.end("a")
    assert places.ask("a")  # two each: a place that comes free is for who left it
    assert places.had == {"a": 2, "b": 2}
    places.end("b")
    assert not places.ask("a")
    assert places.ask("b")


def test_the_last_places_are_kept_for_tenants_below_their_share(broker: Broker, raw: Redis) -> None:
    places = Places(broker, raw, 64)
    assert places.ask("b")
    assert places.ask_all("a") == 64 - 1 - 8
    assert places.ask_all("b") == 8
    assert not places.ask("c")
    places.end("a")
    assert places.ask("c")


def test_a_tenant_that_asks_no_more_is_forgotten(broker: Broker, raw: Redis) -> None:
    places = Places(broker, raw, 64)
    assert places.ask("b")
    places.end("b")
    assert places.ask_all("a") == 56
    places.pass_s(2 * keys.LATELY_S)
    places.gateways[1].lease.renew()
    assert places.ask_all("a") == 8


@pytest.mark.parametrize("tenants", [2, 9])
def test_greedy_tenants_come_to_have_equal_shares(broker: Broker, raw: Redis, tenants: int) -> None:
    """One has all at first. Then all ask for more all the time, the first of them ten times as often."""
    chance = random.Random(7)
    places = Places(broker, raw, 64)
    assert places.ask_all("0") == 64
    names = [str(number) for number in range(tenants)]
    for _ in range(600):
        places.end_any(chance)
        for name in chance.sample(names + ["0"] * 10, 5):
            places.ask(name)
        assert int(raw.hget(SUMS, "places") or 0) == places.had.total() <= 64
    for name in reversed(names):
        places.ask_all(name)
    share = 64 / tenants
    assert all(share - 8 <= places.had[name] <= share + 8 + 1 for name in names), places.had


def test_of_what_is_held_for_long_each_has_as_much_as_is_free(broker: Broker, raw: Redis) -> None:
    places = Places(broker, raw, 64)
    places.room = replace(places.room, is_long=True)
    assert [places.ask_all(each) for each in "abc"] == [32, 16, 8]
    for _ in range(32):
        places.end("a")
    assert places.ask_all("d") == 20
    ledger, size = places.gateways[0], Room("bytes", 6400, is_long=True)
    ledger.take("a", {size: 6000})  # one that is large is not refused for ever
    with pytest.raises(NoRoom):
        ledger.take("b", {size: 401})
    ledger.take("b", {size: 200})


def test_all_kinds_of_room_are_taken_or_none(broker: Broker, raw: Redis) -> None:
    ledger, place, size = Ledger(broker.connection), Room("places", 2), Room("bytes", 100)
    ledger.take("a", {place: 1, size: 90})
    with pytest.raises(NoRoom) as refused:
        ledger.take("a", {place: 1, size: 20})
    assert (refused.value.room, refused.value.is_share) == (size, False)
    assert raw.hgetall(SUMS) == {b"places": b"1", b"places a": b"1", b"bytes": b"90", b"bytes a": b"90"}
    assert all(raw.pttl(name) > 0 for name in raw.keys("embed:*"))


def test_the_room_of_a_killed_gateway_comes_back_and_that_of_others_stays(broker: Broker, raw: Redis) -> None:
    places = Places(broker, raw, 4)
    assert places.ask_all("a") == 4
    places.pass_s(keys.LEDGER_LEASE_S - keys.CLOCK_STEP_S)  # the first gateway goes on
    assert raw.hget(SUMS, "places") == b"4"
    places.pass_s(2 * keys.CLOCK_STEP_S)
    assert raw.hget(SUMS, "places") == b"2"
    places.gateways[1].lease.renew()  # it was not dead
    assert raw.hget(SUMS, "places") == b"4"


def test_a_lost_answer_leaves_no_place_that_nobody_has(
    broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, place = Ledger(broker.connection), Room("places", 4)
    taken = ledger.take("a", {place: 1})
    script = broker.connection.script

    def in_vain(*args: object) -> None:
        script(*args)  # type: ignore[arg-type]
        raise BrokerUnavailable("the answer is lost")

    with monkeypatch.context() as patched:
        patched.setattr(broker.connection, "script", in_vain)
        with pytest.raises(BrokerUnavailable):
            ledger.take("b", {place: 1})
        patched.setattr(broker.connection, "script", lambda *_: (_ for _ in ()).throw(BrokerUnavailable("away")))
        taken.give()
        with pytest.raises(BrokerUnavailable):
            ledger.tell()
    assert raw.hget(SUMS, "places") == b"2"
    ledger.lease.renew()
    assert raw.hgetall(SUMS) == {}


def test_a_redis_that_lost_all_counts_again_what_is_held(broker: Broker, raw: Redis) -> None:
    ledger, place = Ledger(broker.connection), Room("places", 4)
    ledger.take("a", {place: 2})
    taken = ledger.take("a", {place: 1})
    raw.flushall()
    taken.give()
    ledger.tell()
    assert raw.hgetall(SUMS) == {}
    ledger.lease.renew()
    assert raw.hgetall(SUMS) == {b"places": b"2", b"places a": b"2"}
    ledger.close()
    assert raw.hgetall(SUMS) == {}


def test_a_place_is_taken_with_its_job_or_neither_is(broker: Broker, raw: Redis, settings: Settings) -> None:
    place = Room("places", 1)
    first, second = Ledger(broker.connection), Ledger(broker.connection)
    taking = first.taking("a", {place: 1})
    with taken_with_job(taking):
        job_id = new_job(broker, 1, tenant="a")
    assert raw.hgetall(SUMS) == {b"places": b"1", b"places a": b"1"}
    with taken_with_job(second.taking("b", {place: 1})):
        for begin in (lambda: new_job(broker, 1), lambda: enqueue_embeddings(["a text"], settings=settings)):
            with pytest.raises(NoRoom):
                begin()
    assert [job.id for job in broker.jobs.newest()] == [job_id]
    taking.give()
    with taken_with_job(first.taking("b", {place: 1})):  # it tells what was given back
        enqueue_embeddings(["a text"], settings=settings)
    assert raw.hgetall(SUMS) == {b"places": b"1", b"places b": b"1"}


def test_what_is_given_before_it_is_taken_is_not_kept(broker: Broker, raw: Redis) -> None:
    """A caller goes away while its job is made."""
    ledger = Ledger(broker.connection)
    taking = ledger.taking("a", {Room("places", 1): 1})
    taking.give()
    with taken_with_job(taking):
        new_job(broker, 1)
    ledger.tell()
    assert raw.hgetall(SUMS) == {}
    ledger.lease.renew()
    assert raw.hgetall(SUMS) == {}
