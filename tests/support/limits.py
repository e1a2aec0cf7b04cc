"""Other limits than users have: for settings of this process, and for processes that it starts.

Variables tell a process, such as LIMIT_PART_RECORDS=20. Forks read them, and so does a new Python with the variables of
:func:`tests.support.processes.before_all_else`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from embedctl_config.settings import Limits

if TYPE_CHECKING:
    from embedctl_config.settings import Settings

#: What `Limits()` holds.
DEFAULTS: dict[str, Any] = Limits.__init__.__kwdefaults__ or {}


def limited(settings: Settings, **limits: Any) -> Settings:
    """These settings with some limits changed."""
    return settings.replace(limits=dataclasses.replace(settings.limits, **limits))


def settings_of(environment: Mapping[str, str]) -> Settings:
    """The settings and the limits of a process with these variables."""
    # Here, because a new Python imports this module before all else.
    from embedctl_config.loading import load_settings

    return limited(load_settings(environment), **_limits_of(environment))


def put_limits() -> None:
    """Change the defaults of this process to what its variables say."""
    DEFAULTS.update(_limits_of(os.environ))


def _limits_of(environment: Mapping[str, str]) -> dict[str, Any]:
    given = {name: environment.get(f"LIMIT_{name.upper()}") for name in DEFAULTS}
    return {name: type(DEFAULTS[name])(value) for name, value in given.items() if value}
