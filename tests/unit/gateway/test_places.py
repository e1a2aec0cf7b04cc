"""Who gets the places of the gateway: each tenant its share, when they are short."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from embedctl_gateway.access.admission import Admission
from embedctl_gateway.http.refusals import Refusal


class Places:
    """An admission, and requests that have places until they are told to end."""

    def __init__(self, most: int) -> None:
        self.now = 0.0
        self.admission = Admission(most, clock=lambda: self.now)
        self._open: list[tuple[str, ExitStack]] = []

    def ask(self, tenant: str) -> bool:
        place = ExitStack()
        try:
            place.enter_context(self.admission.answering(tenant))
        except Refusal:
            return False
        self._open.append((tenant, place))
        return True

    def ask_all(self, tenant: str) -> int:
        """As many as it gets."""
        return sum(iter(lambda: self.ask(tenant), False))

    def end(self, tenant: str) -> None:
        at = next(at for at, (whose, _) in enumerate(self._open) if whose == tenant)
        self._open.pop(at)[1].close()

    def end_any(self, chance: random.Random) -> None:
        self._open.pop(chance.randrange(len(self._open)))[1].close()

    @property
    def had(self) -> Counter[str]:
        return Counter(tenant for tenant, _ in self._open)


@pytest.fixture(params=[1, 2, 7, 256])
def places(request: pytest.FixtureRequest) -> Iterator[Places]:
    places = Places(request.param)
    yield places
    for tenant in list(places.had.elements()):
        places.end(tenant)
    assert places.admission.requests == 0
    assert not places.admission._of_tenant


def test_a_newcomer_gets_the_place_that_comes_free_and_not_who_had_it() -> None:
    places = Places(4)
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


def test_the_last_places_are_kept_for_tenants_below_their_share() -> None:
    places = Places(64)
    assert places.ask("b")
    assert places.ask_all("a") == 64 - 1 - 8
    assert places.ask_all("b") == 8
    assert not places.ask("c")
    places.end("a")
    assert places.ask("c")


def test_a_tenant_that_asks_no_more_is_forgotten() -> None:
    places = Places(64)
    assert places.ask("b")
    places.end("b")
    assert places.ask_all("a") == 56
    places.now += 11
    assert places.ask_all("a") == 8
    assert set(places.admission._asked) == {"a"}


def test_a_check_takes_no_place() -> None:
    admission = Admission(1)
    for _ in range(3):
        admission.check("a")
    with admission.answering("a"):
        with pytest.raises(Refusal, match="1 requests are in flight") as refused:
            admission.check("b")
        assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "1")
        assert admission.requests == 1
    admission.check("a")


@pytest.mark.parametrize("tenants", [2, 9])
def test_greedy_tenants_come_to_have_equal_shares(tenants: int) -> None:
    """One has all at first. Then all ask for more all the time, the first of them ten times as often."""
    chance = random.Random(7)
    places = Places(64)
    assert places.ask_all("0") == 64
    names = [str(number) for number in range(tenants)]
    for _ in range(3000):
        places.end_any(chance)
        for name in chance.sample(names + ["0"] * 10, 5):
            places.ask(name)
        assert places.admission.requests <= 64
    share = 64 / tenants
    assert all(share - 8 <= places.had[name] <= share + 8 + 1 for name in names), places.had
