"""CUDA graphs of a packed model's layers: one call begins a batch, where otherwise each kernel takes a call."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch

from embedctl_workers.backends.gpu.buckets import Bucket
from embedctl_workers.backends.gpu.device import Gpu, Graph, watched
from embedctl_workers.backends.gpu.transfer import ALIGNED
from embedctl_workers.redaction import first_line

log = logging.getLogger(__name__)

#: The most graphs at once. Beyond their common memory, each takes some for every kernel that it holds.
_MOST_GRAPHS = 32
#: The largest difference allowed between a graph and the same layers without one, for values of about 1.
_TOLERANCE = 0.03

#: Integer arrays of a batch by name, one-dimensional, int32 → the last hidden state, tokens × hidden.
Layers = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


class Graphs:
    """Graphs of a model's layers, one for each size of batches that comes again.

    A graph repeats what was captured, at the same addresses. So the arrays of a batch are copied into buffers, and the
    graph writes its result into another. All graphs have the same buffers, and the same memory for everything between:
    they run one after the other on one stream, and none leaves anything there that is read later. The copies into the
    buffers are on that stream too. So is all that reads the result, and it must be queued before the next :meth:`run`.
    Everything is called within the computing stream's context, by one thread at a time.

    `most` is the tokens of the largest batch that is captured; 0 if none is.
    """

    def __init__(self, device: Gpu) -> None:
        self._device = device
        self._allow(0)

    def _allow(self, most: int) -> None:
        self.most = most
        self._seen: set[Bucket] = set()
        self._graphs: OrderedDict[Bucket, Graph] = OrderedDict()
        self._buffers: _Buffers | None = None

    def allow(self, most: int) -> None:
        """Give back all graphs and their memory, and from now on capture batches of at most so many tokens."""
        self._device.synchronize()  # a graph may be running
        self._allow(most)
        self._device.empty_cache()

    def run(self, bucket: Bucket, arrays: Mapping[str, torch.Tensor], layers: Layers) -> torch.Tensor:
        """Run the layers on a batch of this size; the same size always means the same layers.

        The size's second batch is captured, for many sizes come only once. That one waits for the device. The result is
        the last hidden state, tokens × hidden, in float32 or in the layers' own type.
        """
        if graph := self._graphs.get(bucket):
            assert self._buffers is not None
            self._graphs.move_to_end(bucket)
            self._buffers.fill(arrays)
            graph.replay()
            return self._buffers.result(bucket)
        found = layers(arrays)
        if bucket in self._seen and bucket.tokens <= self.most:
            self._capture(bucket, arrays, layers, found)
        self._seen.add(bucket)
        return found

    def _capture(
        self, bucket: Bucket, arrays: Mapping[str, torch.Tensor], layers: Layers, expected: torch.Tensor
    ) -> None:
        """Capture the layers; `expected` is what they give. A failure is logged, and costs nothing but the graphs."""
        try:
            with watched(self._device):
                right = self._try_capture(bucket, arrays, layers, expected)
        except torch.OutOfMemoryError as error:
            log.warning("batches of %d tokens and more run without CUDA graphs: %s", bucket.tokens, first_line(error))
            self.allow(bucket.tokens - 1)
        except RuntimeError as error:
            # torch may keep the memory of a capture that was broken off, so another attempt could cost as much again.
            log.warning("CUDA graphs are not used: %s", first_line(error))
            self.allow(0)
        else:
            if not right:
                log.warning("CUDA graphs are not used: they give other vectors here")
                self.allow(0)

    def _try_capture(
        self, bucket: Bucket, arrays: Mapping[str, torch.Tensor], layers: Layers, expected: torch.Tensor
    ) -> bool:
        """Capture and keep a graph; whether its result is the expected one."""
        buffers = self._buffers = self._buffers or _Buffers(self.most, expected, arrays)
        views = buffers.fill(arrays)
        layers(views)  # a capture must find done what is done once: the thread's handles, and code for these tensors
        beside = next(iter(self._graphs.values()), None)
        graph = self._device.capture(lambda: buffers.result(bucket).copy_(layers(views)), beside)
        graph.replay()
        if not torch.allclose(buffers.result(bucket), expected.float(), _TOLERANCE, _TOLERANCE, equal_nan=True):
            return False
        self._graphs[bucket] = graph
        if len(self._graphs) > _MOST_GRAPHS:  # none is running: the comparison has waited for all
            dropped, _ = self._graphs.popitem(last=False)
            self._seen.discard(dropped)
        return True


class _Buffers:
    """The memory that a batch is copied into, and that its result is written into, for all graphs.

    The largest batch has `most` tokens, and none of its arrays is longer than that + 1; `like` is a result.
    """

    def __init__(self, most: int, like: torch.Tensor, arrays: Mapping[str, torch.Tensor]) -> None:
        step = -(-(most + 1) // ALIGNED) * ALIGNED
        # Views of one tensor, as a batch's arrays are: to torch's compiler, others would be inputs of another kind.
        parts = next(iter(arrays.values())).new_empty(len(arrays), step)
        self._arrays = dict(zip(arrays, parts, strict=True))
        # float32, because pooling wants it: the graph's last copy converts what would have to be converted anyway.
        self._result = like.new_empty(most, like.shape[1], dtype=torch.float32)

    def fill(self, arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self._arrays[name][: len(array)].copy_(array) for name, array in arrays.items()}

    def result(self, bucket: Bucket) -> torch.Tensor:
        return self._result[: bucket.tokens]
