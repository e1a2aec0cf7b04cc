"""What keeps a gateway's memory small."""

from __future__ import annotations

import asyncio
import gc

import pytest

from embedctl_gateway.serving import memory


@pytest.mark.parametrize(("looks", "collects"), [(memory._DUE, True), (memory._DUE - 1, False)])
def test_all_objects_are_looked_at_only_after_much_was_made(
    monkeypatch: pytest.MonkeyPatch, looks: int, *, collects: bool
) -> None:
    collected: list[int] = []
    monkeypatch.setattr(memory, "EVERY_S", 0.0)
    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, looks))
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))

    async def some_rounds() -> None:
        keeping = asyncio.create_task(memory.keep_small())
        for _ in range(10):
            await asyncio.sleep(0)
        keeping.cancel()

    asyncio.run(some_rounds())
    assert bool(collected) == collects
