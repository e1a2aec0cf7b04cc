"""How one chunk uses the device: when it may, whether it still should, and how far it is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


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
