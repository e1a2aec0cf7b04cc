"""`python -m tests.chaos.producer ORDER.json`: submit a job through the library and print its id, as programs do."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embedctl import EmbedctlError, enqueue_embeddings


def main() -> int:
    """Run the command line."""
    order: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    pause_s: float = order["seconds_per_record"]
    items = [json.loads(line) for line in Path(order["corpus"]).read_text(encoding="utf-8").splitlines()]

    def records() -> Iterator[Any]:
        """Yield records as slowly as a corpus that is generated on the fly, so that a producer may die half-way."""
        late_s = 0.0
        for item in items:
            late_s += pause_s
            if late_s > 0.01:
                time.sleep(late_s)
                late_s = 0.0
            if "ids" not in order["options"]:
                yield item
            elif "keep" in order["options"]:
                yield {name: value for name, value in item.items() if name != "id"}
            else:
                yield item["text"]

    options = dict(order["options"])
    if "ids" in options:
        options["ids"] = (item["id"] for item in items)
    try:
        print(enqueue_embeddings(records(), **options).id)
    except EmbedctlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
