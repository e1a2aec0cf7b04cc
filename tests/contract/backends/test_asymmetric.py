"""Asymmetric models are refused by name, and a route of one that is saved by itself is encoded right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router

from embedctl_config.errors import ModelError
from embedctl_config.settings import Settings
from embedctl_workers.backends import load_backend
from embedctl_workers.machine.host import Host
from embedctl_workers.models.catalogue import read_catalogue
from embedctl_workers.models.files import resolve_model
from tests.support.tiny_models import Tiny


@pytest.mark.slow
def test_a_router_is_refused_and_each_of_its_routes_is_a_model(
    tiny_model: Callable[[Tiny], Path], tmp_path: Path
) -> None:
    models: list[Any] = [SentenceTransformer(str(tiny_model(Tiny(seed=seed))), device="cpu") for seed in (0, 1)]
    query, document = map(list, models)
    routes: Any = Router.for_query_document(query_modules=query, document_modules=document)
    both = SentenceTransformer(modules=[routes], device="cpu")
    both.save(str(tmp_path / "both"))
    with pytest.raises(ModelError, match=r"is asymmetric: its module .*\.Router runs other modules") as raised:
        resolve_model(str(tmp_path / "both"))
    assert "\n" not in str(raised.value)
    (listed,) = [each for each in read_catalogue(Settings(), tmp_path).models if each.name.endswith("both")]
    assert "is asymmetric" in listed.problem

    for route, encode in (("query", both.encode_query), ("document", both.encode_document)):
        folder = tmp_path / route
        SentenceTransformer(modules=list(routes.sub_modules[route]), device="cpu").save(str(folder))
        backend = load_backend("torch", str(folder), entry=None, host=Host(1, tmp_path / "cache"), options={})
        found = backend.forward(backend.tokenize(["the text", "a word"], None), np.arange(2))
        expected = encode(["the text", "a word"], normalize_embeddings=True)
        np.testing.assert_allclose(backend.finish(found, normalize=True), expected, rtol=0, atol=1e-5)
