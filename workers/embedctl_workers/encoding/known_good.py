"""A text whose vector a worker knows from its start: where records fail, it tells whether the worker does."""

from __future__ import annotations

from embedctl_config.errors import DeviceLost, WorkerSick
from embedctl_config.hardware import Thresholds
from embedctl_config.wire import ChunkInput, RecordKind
from embedctl_workers.arrays.distance import measure
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.backends.base import Backend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.models.gate_texts import TEXTS
from embedctl_workers.redaction import first_line

#: Of ordinary length: what a worker has to be able to do whatever else it has no memory for.
_TEXT = TEXTS["sentence"].encode()
_CHUNK = ChunkInput(first=0, kinds=bytes([RecordKind.TEXT]), texts=[_TEXT])


class KnownGood:
    """Encodes the text now, and compares it with what came of it then.

    Make one when the model has passed its gate.

    Args:
        bounds: how far the vector may be from that of the start.

    Raises:
        WorkerSick: it can't be encoded even now.
    """

    def __init__(self, backend: Backend, bounds: Thresholds) -> None:
        # One without a known good text of its own: it is asked by another one in the middle of a batch.
        self._encoder = ChunkEncoder(backend, backend.token_budget)
        self._bounds = bounds
        self._right = self._encode()

    def check(self) -> None:
        """Nobody else may run the device meanwhile.

        Raises:
            WorkerSick: the text can't be encoded any more, or its vector is another one.
            DeviceLost: by the backend.
        """
        vectors = self._encode()
        try:
            found = measure(vectors, self._right)
        except Exception as error:  # no memory for even that
            raise _sick(first_line(error)) from error
        if not found.within(self._bounds):
            raise WorkerSick(
                "a text of this worker's own has another vector than at its start (max abs "
                f"{found.max_abs_error:.1e}, cosine {found.min_cosine:.6f})"
            )

    def check_preparing(self) -> None:
        """Needs no device.

        Raises:
            WorkerSick: the text can't be tokenised any more.
        """
        try:
            prepared = self._encoder.prepare(_CHUNK, {})
        except Exception as error:
            raise _sick(first_line(error)) from error
        if prepared.errors:
            raise _sick(prepared.errors[0].message)

    def _encode(self) -> Vectors:
        try:
            encoded = self._encoder.encode(self._encoder.prepare(_CHUNK, {}))
        except DeviceLost:
            raise
        except Exception as error:
            raise _sick(first_line(error)) from error
        if encoded.errors:
            raise _sick(encoded.errors[0].message)
        return encoded.vectors


def _sick(why: str) -> WorkerSick:
    return WorkerSick(f"this worker can't encode a text of its own: {why}")
