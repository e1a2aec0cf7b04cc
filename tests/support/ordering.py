"""The longest tests come first: at the end, one process would work through them while the others idle."""

from __future__ import annotations

import os
from collections import defaultdict

import pytest


@pytest.hookimpl(trylast=True)  # after the others have left out tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
        items[:] = ordered(items, processes)


def ordered(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Tests in an order for processes of which each begins with an equal part of them.

    Each part begins with modules that have tests with time limits of their own, because those are the long ones. Such
    tests of one module stay together, because they share what they make.
    """
    modules: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if limit_s(item):
            modules[item.nodeid.partition("::")[0]].append(item)
    shares: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for module in sorted(modules.values(), key=lambda module: sum(map(limit_s, module)), reverse=True):
        min(shares, key=lambda share: sum(map(limit_s, share))).extend(module)
    # Those that import sentence-transformers, which costs a process seven CPU seconds, begin one part.
    rest = sorted((item for item in items if not limit_s(item)), key=lambda item: "/backends/" not in item.nodeid)
    for at, share in enumerate(shares):
        more = max(0, len(items) * (at + 1) // processes - len(items) * at // processes - len(share))
        share.extend(rest[:more])
        del rest[:more]
    return [item for share in shares for item in share] + rest


def limit_s(item: pytest.Item) -> float:
    """The time limit of a test's own (s), or 0."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark is not None else 0.0
