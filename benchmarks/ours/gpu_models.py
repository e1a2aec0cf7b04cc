"""The models that the GPU benchmark encodes with: all-MiniLM-L6-v2, and random weights in the shapes of others."""

from __future__ import annotations

from pathlib import Path

from embedctl_bench.measuring.shapes import SHAPES, ModelShape, write_shape
from embedctl_bench.peers.models import Model, uncut, written
from embedctl_workers.models.files import resolve_model

#: The folder of environments, models and texts, which git ignores.
PLACE = Path(__file__).parents[2] / "build" / "peers"
#: By the name that `--models` takes: an installed model, or a shape of `embedctl_bench.measuring.shapes`.
MODELS = {
    "minilm": "all-MiniLM-L6-v2",
    "bge-base": "bge-base-shape",
    "bge-large": "bge-large-shape",
}
#: The shape of all-MiniLM-L6-v2, for a seed that has its tokenizer but no weights.
MINILM = ModelShape("bert", layers=6, hidden=384, heads=12, pooling="mean")


def model_of(name: str, place: Path, seed: Path | None = None) -> Model:
    """The model of that name, made when first needed. It takes 512 tokens, so that W2 fits.

    Args:
        seed: all-MiniLM-L6-v2's folder, which gives tokenizer and modules; None for the installed package. If it has no
            weights, minilm gets random weights and another name.

    Raises:
        ModelNotFound: there is no seed, and all-MiniLM-L6-v2 is not installed.
    """
    source = MODELS[name]
    shape = SHAPES.get(source)
    if shape is None:
        if seed is None or (seed / "model.safetensors").is_file():
            return uncut(name, seed or resolve_model(source).folder, place)
        name, shape = f"{name}-random", MINILM
    folder = place / "models" / name
    if not folder.is_dir():
        written(folder, lambda into: write_shape(shape, into, seed))
    return Model.in_folder(name, folder)


def is_random(model: Model) -> bool:
    """Whether its weights are random."""
    return MODELS.get(model.name) in {None, *SHAPES}
