"""A chunk between the tokeniser and the device; and when it may use the device, and whether it still should."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from embedctl_config.wire import RecordError
from embedctl_workers.arrays.tokens import Rows, Tokens, Windows


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chunk that is ready for the device."""

    rows: int  #: how many records there are
    source: Rows  #: int64, one for each record: which of the distinct texts it holds; -1 if it has failed already
    texts: int  #: how many distinct texts there are
    tokens: Tokens  #: of the distinct texts; then, if some texts have several windows, of their further windows
    batches: list[Rows]  #: rows of `tokens`
    windows: Windows | None  #: which text each row of `tokens` belongs to; None if each text has one window
    dim: int  #: length of the dense vectors to make
    #: whether the encoder averages windows or cuts vectors, and then normalises instead of the backend
    postprocess: bool
    normalize: bool  #: whether vectors get unit length
    errors: Mapping[int, RecordError] = field(default_factory=dict)  #: of records that have failed already
    about: Mapping[str, object] | None = None  #: fields for log lines about this chunk
    pieces: Sequence[Tokens] = ()  #: the tokens of each batch, if batches of several chunks may be joined; else empty

    @property
    def unit(self) -> bool:
        """Whether the backend is to normalise."""
        return self.normalize and not self.postprocess

    @property
    def key(self) -> object:
        """Equal for chunks of one encoder whose rows may be in one batch; None if no other chunk's may."""
        if self.windows is not None or not self.batches:
            return None
        return self.unit, self.tokens.outputs, self.tokens.prompt_tokens, frozenset(self.tokens.columns)

    def tokens_of(self, batch: Rows) -> Tokens:
        """The tokens for a batch. Only the first window of a text begins with the prompt."""
        return self.tokens if batch[0] < self.texts else replace(self.tokens, prompt_tokens=None)


class Stopped(Exception):
    """Raised between two batches when the chunk is no longer wanted."""


class DeviceUse:
    """The use of a device that nothing else uses, by a chunk that stays wanted. Subclasses say otherwise."""

    def turn(self) -> AbstractContextManager[object]:
        """A context in which batches are begun, and nobody else begins any.

        It ends before the last batches are awaited, so that another thread may begin those of the next chunk meanwhile.
        If the batches are begun by a :class:`~embedctl_workers.encoding.joining.Launcher`, no turn is taken for them.
        If batches failed, there is another turn, in which their rows are told apart.
        """
        return nullcontext()

    def check_wanted(self) -> None:
        """Called before each batch, by the thread that begins it; raises Stopped if the chunk is no longer wanted."""

    def on_batch(self, tokens: int) -> None:
        """Called after each batch with its tokens."""


SOLE_USE = DeviceUse()
