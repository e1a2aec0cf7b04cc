"""The explorer finds jobs that the reaper would never look at. The sweep is what prevents such jobs."""

from __future__ import annotations

from pathlib import Path

from embedctl.store import Upkeep
from embedctl.store.agenda import Agenda
from embedctl.store.connection import Connection, script_source
from embedctl_config.settings import Settings
from tests.explorer.scenarios import SCENARIOS


class ForgetfulAgenda(Agenda):
    """An agenda whose sweep adds nothing."""

    def _put(self, version: int, late: object, missing: object) -> None:
        pass


class ForgetfulUpkeep(Upkeep):
    def __init__(self, connection: Connection, settings: Settings) -> None:
        super().__init__(connection, settings)
        self.agenda = ForgetfulAgenda(connection, settings)


def of_an_older_version(name: str) -> str:
    """A script that writes nothing into the agenda."""
    return script_source(name).replace(
        "if redis.call('ZADD', upkeep, 'LT'", "if false and redis.call('ZADD', upkeep, 'LT'"
    )


def test_the_sweep_finds_a_job_that_its_scripts_put_into_no_agenda(folder: Path) -> None:
    with SCENARIOS["retry"].machine(folder, scripts=of_an_older_version) as machine:
        coverage = machine.explore(most=500)
    assert coverage.steps > 100
    assert not coverage.found, "\n".join(map(str, coverage.found))


def test_a_job_that_nobody_looks_after_is_found(folder: Path) -> None:
    parts = {"upkeep": ForgetfulUpkeep}
    with SCENARIOS["retry"].machine(folder, scripts=of_an_older_version, parts=parts) as machine:
        coverage = machine.explore(most=500, stop_at="what is active is looked after")
    assert any(each.violation.invariant == "what is active is looked after" for each in coverage.found)
