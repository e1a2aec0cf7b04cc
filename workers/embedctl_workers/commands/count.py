"""`python -m embedctl_workers.commands.count MODEL [--windows]` counts the tokens of texts, for a dry run.

Each text on standard input is a u32 length and its UTF-8. At the end of the input it prints one JSON object: `tokens`
that would be encoded, `truncated` texts, and `dim`, the length of a vector. With `--windows`, texts that are too long
are not truncated but encoded window by window. With `--prompt-name=NAME`, the model's prompt of that name is put before
each text. It exits with 1 if the model, its tokenizer or the prompt is missing.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator
from itertools import islice
from typing import IO

from embedctl_config.errors import EmbedctlError, ModelError
from embedctl_config.loading import load_settings

_BATCH = 512


def main() -> None:
    name, windows = sys.argv[1], "--windows" in sys.argv[2:]
    prompt_name = next((each.partition("=")[2] for each in sys.argv[2:] if each.startswith("--prompt-name=")), None)
    try:
        from tokenizers import Tokenizer

        from embedctl_workers.models.facts import facts_of
        from embedctl_workers.models.files import resolve_model
        from embedctl_workers.models.prompts import prompts_of

        folder = resolve_model(name, load_settings().models.get(name)).folder
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        prompt = "" if prompt_name is None else prompts_of(folder)[prompt_name]
        facts = facts_of(folder)
        if facts.longest_text is None or facts.dimensions is None:
            raise ModelError("its files do not say how long a text or a vector is")
    except (ImportError, OSError, KeyError, ValueError, EmbedctlError) as error:
        sys.exit(f"can't count the tokens of {name}: {error}")
    # The tokenizer's file may ask for truncation and padding, and then the counts would be wrong.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokens = truncated = 0
    longest = facts.longest_text
    special = tokenizer.num_special_tokens_to_add(is_pair=False)
    texts = _texts(sys.stdin.buffer)
    while batch := list(islice(texts, _BATCH)):
        for encoding in tokenizer.encode_batch_fast([prompt + text for text in batch]):
            count = len(encoding.ids)
            if windows:
                more = max(0, math.ceil((count - longest) / (longest - special)))
                tokens += count + more * special
            else:
                tokens += min(count, longest)
                truncated += count > longest
    print(json.dumps({"tokens": tokens, "truncated": truncated, "dim": facts.dimensions}))  # noqa: T201


def _texts(stream: IO[bytes]) -> Iterator[str]:
    while head := stream.read(4):
        yield stream.read(struct.unpack("<I", head)[0]).decode()


if __name__ == "__main__":
    main()
