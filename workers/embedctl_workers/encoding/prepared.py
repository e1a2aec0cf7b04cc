"""A chunk between the tokeniser and the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from embedctl_config.wire import RecordError
from embedctl_workers.arrays.tokens import Rows, Tokens, Windows


@dataclass(slots=True)
class Prepared:
    """A chunk that is ready for the device.

    Attributes:
        source: int64, one a record: which of the distinct texts it holds, or -1 where it failed already.
        texts: how many distinct texts there are.
        tokens: of the distinct texts, in their first rows; then of the windows that follow, where some have several.
        batches: rows of `tokens`.
        windows: which texts the rows of `tokens` belong to, where some have several.
        dim: length of the vectors to make.
        raw: whether the backend's vectors are worked on before they are normalised.
        errors: by record.
        about: fields for the lines of the log about this chunk.
    """

    rows: int
    source: Rows
    texts: int
    tokens: Tokens
    batches: list[Rows]
    windows: Windows | None
    dim: int
    raw: bool
    normalize: bool
    errors: dict[int, RecordError] = field(default_factory=dict)
    about: Mapping[str, object] | None = None

    def tokens_of(self, batch: Rows) -> Tokens:
        """The tokens for a batch. A prompt stands in the first window of a text alone."""
        return self.tokens if batch[0] < self.texts else replace(self.tokens, prompt_tokens=None)
