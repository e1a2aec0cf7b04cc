"""The known good text: a worker knows its vector from the start, so a check tells if a failure is the worker's."""

from __future__ import annotations

from embedctl_config.errors import DeviceLost, WorkerSick
from embedctl_config.hardware import HardwareClass, Thresholds
from embedctl_config.outputs import Output
from embedctl_config.settings import Settings
from embedctl_config.wire import ChunkInput, RecordKind
from embedctl_workers.arrays.distance import measure
from embedctl_workers.arrays.outputs import side_by_side
from embedctl_workers.arrays.tokens import Found
from embedctl_workers.backends import load_backend
from embedctl_workers.backends.base import Backend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models.facts import is_matryoshka, pooling_of, prompts_of
from embedctl_workers.models.gate_texts import KNOWN_GOOD, TEXTS
from embedctl_workers.redaction import first_line

_CHUNK = ChunkInput(first=0, kinds=bytes([RecordKind.TEXT]), texts=[TEXTS[KNOWN_GOOD].encode()])


class KnownGood:
    """Encodes the known good text again, and compares the vector with that of the worker's start, within these bounds.

    Make one when the model has passed its gate. WorkerSick if the text can't be encoded even at the start.
    """

    def __init__(self, backend: Backend, bounds: Thresholds) -> None:
        # An encoder without a known good text: another encoder calls this one in the middle of a batch.
        self._encoder = ChunkEncoder(backend, backend.token_budget)
        self._bounds = bounds
        self._right = self._encode()

    def check(self) -> None:
        """Encode the text and compare its vector. Nobody else may run the device meanwhile.

        WorkerSick if the text can't be encoded any more, or its vector has changed; DeviceLost by the backend.
        """
        vectors = self._encode()
        try:
            found = measure(*side_by_side(vectors, self._right))
        except Exception as error:  # not enough memory even for the comparison
            raise _sick(first_line(error)) from error
        if not found.within(self._bounds):
            raise WorkerSick(
                "a text of this worker's own has another vector than at its start (max abs "
                f"{found.max_abs_error:.1e}, cosine {found.min_cosine:.6f})"
            )

    def check_preparing(self) -> None:
        """Tokenise the text, which needs no device; WorkerSick if it can't be tokenised any more."""
        try:
            prepared = self._encoder.prepare(_CHUNK, self._encoder.own_options)
        except Exception as error:
            raise _sick(first_line(error)) from error
        if prepared.errors:
            raise _sick(prepared.errors[0].message)

    def _encode(self) -> Found:
        try:
            encoded = self._encoder.encode(self._encoder.prepare(_CHUNK, self._encoder.own_options))
        except DeviceLost:
            raise
        except Exception as error:
            raise _sick(first_line(error)) from error
        if encoded.errors:
            raise _sick(encoded.errors[0].message)
        return encoded.vectors if Output.DENSE in self._encoder.backend.outputs else encoded.vectors[:, 0]


def _sick(why: str) -> WorkerSick:
    return WorkerSick(f"this worker can't encode a text of its own: {why}")


def load_encoder(settings: Settings, hardware: HardwareClass, model: str, host: Host) -> ChunkEncoder:
    """Load and warm up a model; raises as :func:`~embedctl_workers.backends.load_backend`."""
    backend = load_backend(
        hardware.backend, model, entry=settings.models.get(model), host=host, options=hardware.options
    )
    backend.warm_up()
    prompts = prompts_of(backend.reference.files.folder) if backend.reference else {}
    budget = hardware.token_budget or backend.token_budget
    encoder = ChunkEncoder(backend, budget, model=model, prompts={**prompts, **backend.own_prompts})
    encoder.matryoshka = backend.reference is None or is_matryoshka(backend.reference.files.folder)
    encoder.pooling = pooling_of(backend.reference.files) if backend.reference else ""
    return encoder
