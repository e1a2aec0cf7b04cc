"""The stand-in for a GPU."""

from __future__ import annotations

import time

import numpy as np
import torch

from embedctl_workers.backends.gpu.transfer import Transfer
from tests.support.host_stand_in import StandInDevice
from tests.support.host_stand_in_vectors import Tables, TorchTables

_TEXTS = ([101, 7, 8, 102], [101, 8, 7, 102], [101, 102], [5] * 300)


def _vectors(texts: list[list[int]], tables: Tables) -> np.ndarray:
    ids = torch.tensor([each for text in texts for each in text], dtype=torch.int32)
    places = torch.tensor([place for text in texts for place in range(len(text))], dtype=torch.int32)
    offsets = torch.tensor(np.cumsum([0, *map(len, texts)]), dtype=torch.int32)
    found: np.ndarray = TorchTables(tables)(ids, places, offsets).numpy()
    return found


def test_a_vector_of_the_stand_in_follows_from_its_own_texts_ids_alone() -> None:
    tables = Tables.of(vocabulary=200, dim=24)
    texts = list(_TEXTS)
    together = _vectors(texts, tables)
    assert len({vector.tobytes() for vector in together}) == len(texts)
    for at, text in enumerate(texts):
        assert together[at].tobytes() == _vectors([text], tables)[0].tobytes()
        unit = together[at] / np.linalg.norm(together[at])
        assert np.abs(unit - tables.expected(text)).max() < 1e-6
    assert _vectors(texts[::-1], tables)[::-1].tobytes() == together.tobytes()


def test_the_stand_in_takes_its_time_for_one_batch_after_the_other() -> None:
    device = StandInDevice(ns_per_token=4e7)
    transfer = Transfer(device)
    began = time.monotonic()
    outputs = []
    for tokens in (30, 20):
        with transfer.computing():
            device.compute(tokens)
        outputs.append(transfer.download(torch.zeros(1, 2)))
    assert time.monotonic() - began < 1.2  # beginning a batch does not wait
    ended = []
    for output in outputs:
        output.wait()
        ended.append(time.monotonic() - began)
    assert 1.2 <= ended[0] < 2 <= ended[1]
