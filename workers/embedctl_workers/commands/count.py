"""`python -m embedctl_workers.commands.count MODEL [--windows] [--prompt-name=NAME]` counts tokens, for a dry run.

Each text on standard input is a u32 length and its UTF-8. At the end of the input it prints one JSON object: `tokens`
that would be encoded, `truncated` texts, and `dim`, the length of a vector. With `--windows`, texts that are too long
are not truncated but encoded window by window. The prompt is as for :func:`opened`. It exits with 1 if something is
missing.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator
from itertools import islice
from typing import IO

from embedctl_workers.commands.split import opened

_BATCH = 512


def main() -> None:
    name, *flags = sys.argv[1:]
    model = opened(name, flags)
    windows = "--windows" in flags
    tokens = truncated = 0
    longest = model.longest
    special = model.tokenizer.num_special_tokens_to_add(is_pair=False)
    texts = _texts(sys.stdin.buffer)
    while batch := list(islice(texts, _BATCH)):
        for count in model.counts([model.prompt + text for text in batch]):
            if windows:
                more = max(0, math.ceil((count - longest) / (longest - special)))
                tokens += count + more * special
            else:
                tokens += min(count, longest)
                truncated += count > longest
    print(json.dumps({"tokens": tokens, "truncated": truncated, "dim": model.dim}))  # noqa: T201


def _texts(stream: IO[bytes]) -> Iterator[str]:
    while head := stream.read(4):
        yield stream.read(struct.unpack("<I", head)[0]).decode()


if __name__ == "__main__":
    main()
