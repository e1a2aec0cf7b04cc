"""Compiles a tokenizer if it can be, and checks it against the library before it is used."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from importlib.resources import files
from random import Random

import numpy as np
from tokenizers import Tokenizer

from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import note, noted, software
from embedctl_workers.models.compiling import NOT_COMPILED, compiled, digest_of
from embedctl_workers.models.gate_texts import PROMPT, TEXTS
from embedctl_workers.models.wordpiece.compiled import CompiledWordPiece, OddWords, load_library
from embedctl_workers.models.wordpiece.rules import NotSupported, Rules, rules_of

log = logging.getLogger(__name__)

_FLAGS = ("-O2", "-fPIC")
#: Generated texts of the check, and the length at which they are cut.
_GENERATED, _CHECK_TOKENS = 300, 24


def fast_tokenizer_for(tokenizer: Tokenizer, host: Host) -> CompiledWordPiece | None:
    """A compiled tokenizer with exactly this one's tokens; None if there is none, with one line in the log.

    It keeps this one, which loses its truncation and padding.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    text = tokenizer.to_str()
    try:
        rules = rules_of(json.loads(text))
        library = compiled(files("embedctl_workers.models.wordpiece") / "wordpiece.c", _FLAGS, host, load_library)
    except NotSupported as why:
        log.debug("no compiled tokenizer: %s", why)
        return None
    except NOT_COMPILED as error:
        log.info("no compiled tokenizer, which would be several times faster: %s", error)
        return None
    fast = CompiledWordPiece(library, rules, OddWords(tokenizer))
    facts = [hashlib.sha256(text.encode()).hexdigest(), digest_of(library), software()]
    if not noted(host.cache, "tokenizers", facts):
        if not _agrees(fast, tokenizer, rules):
            log.warning("the compiled tokenizer differs from the library and is not used: please report the model")
            return None
        note(host.cache, "tokenizers", facts, True)
    log.info("compiled tokenizer")
    return fast


def _agrees(fast: CompiledWordPiece, library: Tokenizer, rules: Rules) -> bool:
    """Whether both cut a few hundred texts into the same tokens, from either end."""
    texts = [*TEXTS.values(), *(PROMPT + text for text in TEXTS.values()), *_generated(rules)]
    special = len(rules.before) + len(rules.after)
    for keep_end in (False, True):
        cut = fast(texts, special + _CHECK_TOKENS, keep_end=keep_end)
        library.enable_truncation(special + _CHECK_TOKENS, direction="left" if keep_end else "right")
        expected = library.encode_batch_fast(texts)
        library.no_truncation()
        for at in np.flatnonzero(cut.lost >= 0).tolist():
            lost = sum(len(part) - special for part in expected[at].overflowing)
            if (cut.ids[at].tolist(), cut.lost[at]) != (expected[at].ids, lost) or any(expected[at].type_ids):
                return False
    return True


def _generated(rules: Rules) -> Sequence[str]:
    """Strings of ASCII from this vocabulary, the same every time."""
    random = Random(0)  # noqa: S311  (no secrets)
    pieces = [piece for piece in rules.vocabulary if piece.isascii()]
    marks = [chr(code) for code in range(128)] + ["  ", "\u2019", "\u00e9", *rules.added]
    return [
        "".join(
            random.choice(pieces if random.random() < 0.6 else marks) + random.choice(["", "", " "])
            for _ in range(random.randrange(40))
        )
        for _ in range(_GENERATED)
    ]
