"""What the commands that count and split texts need of a model: its tokenizer, its longest text, and a prompt."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from embedctl_config.errors import EmbedctlError, ModelError
from embedctl_config.hardware import ModelEntry
from embedctl_config.loading import load_settings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PROMPT = "--prompt-name="


@dataclass(frozen=True, slots=True)
class TextModel:
    """A tokenizer that neither cuts nor pads, the most tokens of a text, special ones included, the dimensions of a
    vector, and the prompt that stands before each text."""

    tokenizer: Tokenizer
    longest: int
    dim: int
    prompt: str

    def counts(self, texts: Sequence[str]) -> list[int]:
        """How many tokens texts have, special ones included."""
        return [len(each.ids) for each in self.tokenizer.encode_batch_fast(texts)]


def opened(name: str, flags: Sequence[str]) -> TextModel:
    """The model of this name. With `--prompt-name=NAME`, its prompt of that name stands before each text, or its
    default one if the name is empty; without, none. It ends the process if the model, its tokenizer or the prompt is
    missing."""
    try:
        from tokenizers import Tokenizer

        from embedctl_workers.models.facts import facts_of, transformer_of
        from embedctl_workers.models.files import find_folder
        from embedctl_workers.models.prompts import prompt_named

        folder = find_folder(name, load_settings().models.get(name, ModelEntry()))
        tokenizer = Tokenizer.from_file(str(transformer_of(folder) / "tokenizer.json"))
        named = next((each.removeprefix(_PROMPT) for each in flags if each.startswith(_PROMPT)), None)
        prompt = "" if named is None else prompt_named(folder, named)
        facts = facts_of(folder)
        if facts.longest_text is None or facts.dimensions is None:
            raise ModelError("its files do not say how long a text or a vector is")
    except (ImportError, OSError, KeyError, TypeError, ValueError, EmbedctlError) as error:
        sys.exit(f"the tokenizer of {name} can't be used here: {error}")
    # The tokenizer's file may ask for truncation and padding, and then the counts would be wrong.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextModel(tokenizer, facts.longest_text, facts.dimensions, prompt)
