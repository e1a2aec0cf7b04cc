"""Refuses models that are computed by code of their author, which transformers would run as something else."""

from __future__ import annotations

from collections.abc import Mapping

from embedctl_config.errors import ModelError

#: A part of the name of an author's code → a model that needs none.
_SIBLINGS = {
    "new-impl": "alibaba-nlp-community/gte-multilingual-base or Alibaba-NLP/gte-modernbert-base",
    "qwen": "Qwen/Qwen3-Embedding-0.6B",
    "": "Alibaba-NLP/gte-modernbert-base",
}
#: The one architecture whose models name their author's code, and that transformers computes from the same files.
_NATIVE = "nomic_bert"
#: Its author's fields, which transformers does not read → transformers' field of the same meaning, and its default.
_NATIVE_FIELDS: Mapping[str, tuple[str, object]] = {
    "n_embd": ("hidden_size", 768),
    "n_layer": ("num_hidden_layers", 12),
    "n_head": ("num_attention_heads", 12),
    "n_inner": ("intermediate_size", 3072),
    "layer_norm_epsilon": ("layer_norm_eps", 1e-12),
    "activation_function": ("", "swiglu"),
    "rotary_emb_base": ("", 1000),
    "rotary_emb_fraction": ("", 1),
    "rotary_emb_interleaved": ("", False),
    "rotary_scaling_factor": ("", None),
    "prenorm": ("", False),
    "use_rms_norm": ("", False),
    "qkv_proj_bias": ("", False),
    "mlp_fc1_bias": ("", False),
    "mlp_fc2_bias": ("", False),
}


def refuse_authors_code(file: str, config: Mapping[str, object]) -> None:
    """Refuse (ModelError) a model that its author's code computes: without it, transformers may compute other vectors.

    `config` holds the contents of its `config.json`, which is at `file`.
    """
    if config.get("model_type") == _NATIVE:
        _refuse_other_fields(file, config)
        return
    named = config.get("auto_map")
    if not isinstance(named, dict):
        return
    if code := named.get("AutoModel", named.get("AutoConfig")):
        sibling = next(sibling for part, sibling in _SIBLINGS.items() if part in str(code).lower())
        raise ModelError(
            f"{file} names {str(code)!r}, its author's own code, which embedctl does not run: choose a model that "
            f"transformers computes by itself, such as {sibling}, or a copy that was converted for it"
        )


def _refuse_other_fields(file: str, config: Mapping[str, object]) -> None:
    for theirs, (ours, default) in _NATIVE_FIELDS.items():
        computed = config.get(ours, default)
        if theirs in config and config[theirs] != computed:
            raise ModelError(
                f"{file} states {theirs} {config[theirs]!r}, which only its author's own code reads, and transformers "
                f"would compute with {computed!r}: choose a model that transformers computes by itself, such as "
                "nomic-ai/nomic-embed-text-v1.5"
            )
