"""The models that the GPU benchmark encodes with: all-MiniLM-L6-v2, and random weights in the shapes of others."""

from __future__ import annotations

from pathlib import Path

from embedctl_bench.measuring.shapes import SHAPES, ModelShape, write_shape
from embedctl_bench.peers.models import Model, uncut, written
from embedctl_workers.models.files import resolve_model

#: Environments, models and texts; git does not see them.
PLACE = Path(__file__).parents[2] / "build" / "peers"
#: By the name that `--models` takes: an installed model, or a shape of `embedctl_bench.measuring.shapes`.
MODELS = {
    "minilm": "all-MiniLM-L6-v2",
    "bge-base": "bge-base-shape",
    "bge-large": "bge-large-shape",
}
#: all-MiniLM-L6-v2's, for where there is its tokenizer alone.
_MINILM = ModelShape("bert", layers=6, hidden=384, heads=12, pooling="mean")


def model_of(name: str, place: Path, seed: Path | None = None) -> Model:
    """The model of that name, made when first asked for. It takes 512 tokens, so that W2 fits.

    Args:
        seed: all-MiniLM-L6-v2's folder, which gives tokenizer and modules; the installed package's where None. Without
            weights there, the model that has real ones gets random ones, and another name.

    Raises:
        ModelNotFound: there is no seed, and all-MiniLM-L6-v2 is not installed.
    """
    source = MODELS[name]
    shape = SHAPES.get(source)
    if shape is None:
        if seed is None or (seed / "model.safetensors").is_file():
            return uncut(name, seed or resolve_model(source).folder, place)
        name, shape = f"{name}-random", _MINILM
    folder = place / "models" / name
    if not folder.is_dir():
        written(folder, lambda into: write_shape(shape, into, seed))
    return Model.in_folder(name, folder)


def is_random(model: Model) -> bool:
    """Whether its weights are random ones."""
    return MODELS.get(model.name) in {None, *SHAPES}
