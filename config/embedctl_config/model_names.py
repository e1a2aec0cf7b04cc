"""Names of models: the two spellings of one repository, and names that resemble each other.

On the hub, a name without an organisation is taken for one of `sentence-transformers`. So `all-MiniLM-L6-v2` and
`sentence-transformers/all-MiniLM-L6-v2` are two spellings of one name. Whether both lead to the same files is for the
machine with the files to say: a local folder or an entry of its settings may give each spelling a model of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ORGANISATION = "sentence-transformers/"
#: Most names that are suggested for one that nobody knows.
_SUGGESTED = 3


def hub_id(name: str) -> str:
    """The repository that a name means on the hub."""
    return name if "/" in name else _ORGANISATION + name


def other_spelling(name: str) -> str | None:
    """The other name of the same repository; None if there is none."""
    short = name.removeprefix(_ORGANISATION)
    if not short or "/" in short:
        return None
    return short if short != name else _ORGANISATION + name


def short_name(repository: str) -> str:
    """A repository's name without the organisation, if that means the same repository."""
    return min(repository, other_spelling(repository) or repository, key=len)


def near_names(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The known names that resemble a name that is none of them, the nearest first.

    The organisation and the case of letters do not count, because users who mistype a name often omit the former.
    """
    by_form: dict[str, list[str]] = {}
    for each in sorted(set(known) - {name}):
        by_form.setdefault(_form(each), []).append(each)
    forms = difflib.get_close_matches(_form(name), by_form, n=_SUGGESTED)
    return tuple(each for form in forms for each in by_form[form])[:_SUGGESTED]


def did_you_mean(names: Iterable[str]) -> str:
    """The question for names that resemble the one given: `Did you mean A or B?`; empty if there are none."""
    found = " or ".join(names)
    return f"Did you mean {found}?" if found else ""


def unknown_prompt(model: str, prompts: Iterable[str]) -> str:
    """What is wrong with the name of a prompt that a model lacks: the names that it has."""
    names = ", ".join(sorted(prompts))
    return f"model {model} has the prompts {names}" if names else f"model {model} has no prompts with names: use prompt"


def not_matryoshka(model: str) -> str:
    """Why vectors of a model are not cut."""
    return (
        f"neither the card nor the configuration of model {model} says that it was trained for shorter vectors "
        "(Matryoshka), so cut ones may find much less: leave out --dims, or cut them with --dims-anyway (dims_anyway)"
    )


def _form(name: str) -> str:
    return name.rpartition("/")[2].lower()
