"""A model's own prompts, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from embedctl_config.errors import ModelError
from embedctl_workers.models.files import read_json

_FILE = "config_sentence_transformers.json"
#: Most characters of all names together that a heartbeat tells.
_TOLD = 1000


def prompts_of(folder: Path) -> Mapping[str, str]:
    """The prompts of the model in a folder: name → text, which may be empty. A ModelError if they can't be read."""
    path = folder / _FILE
    try:
        prompts = (read_json(path) or {}).get("prompts") or {}
        return {str(name): text for name, text in prompts.items() if isinstance(text, str)}
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} can't be read: {error!r}") from error


def prompt_named(folder: Path, name: str) -> str:
    """The prompt of this name, or with an empty one the default, if there is one. KeyError: there is none; ModelError
    as of :func:`prompts_of`."""
    prompts = prompts_of(folder)
    if name:
        return prompts[name]
    return prompts.get(str((read_json(folder / _FILE) or {}).get("default_prompt_name")), "")


def told(prompts: Mapping[str, str]) -> tuple[str, ...] | None:
    """The names for a heartbeat; None if they are too many."""
    return tuple(sorted(prompts)) if sum(map(len, prompts)) <= _TOLD else None
