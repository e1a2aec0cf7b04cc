"""The calls as a page for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from embedctl_config import __version__
from embedctl_gateway.calls.openapi import CALLS
from embedctl_gateway.calls.schemas import SCHEMAS, TEXTS
from embedctl_gateway.http.fields import MAX_INPUTS


def page() -> str:
    """One HTML page, which loads nothing."""
    return _PAGE.format(version=escape(__version__), calls="".join(_sections()))


def _sections() -> Iterator[str]:
    for method, path, verbs, summary, body, answer in CALLS:
        who = f"a key for {' or '.join(verbs)}" if verbs else "no key"
        yield f"<section><h2><b>{method}</b> <code>{escape(path)}</code></h2><p>{escape(summary)}. Needs {who}.</p>"
        if body is not None and "properties" in SCHEMAS[body]:
            yield _fields(SCHEMAS[body])
        if answer is not None:
            yield f"<details><summary>The answer's schema</summary><pre>{_shown(answer)}</pre></details>"
        yield "</section>"


def _fields(schema: Mapping[str, Any]) -> str:
    rows = (
        f"<tr><td><code>{name}</code>{' (required)' if name in schema['required'] else ''}</td>"
        f"<td>{escape(_in_words(facts))}</td></tr>"
        for name, facts in schema["properties"].items()
    )
    return f"<table><tr><th>field</th><th>takes</th></tr>{''.join(rows)}</table>"


def _in_words(facts: Mapping[str, Any]) -> str:
    if facts is TEXTS:
        return f"a text, or a list of 1 to {MAX_INPUTS:,} texts"
    kinds = facts.get("enum") or facts["type"]
    shown = kinds if isinstance(kinds, list) else [kinds]
    told = f": {facts['description']}" if "description" in facts else ""
    return ", ".join("null" if each is None else str(each) for each in shown) + told


def _shown(schema: str) -> str:
    return escape(json.dumps(SCHEMAS[schema], indent=1))


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>embedctl gateway</title>
<style>
:root {{ color-scheme: light dark; --line: light-dark(#d0d5dd, #3a4250); --soft: light-dark(#f4f6f8, #1c222b); }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem;
  background: light-dark(#fff, #12161c); color: light-dark(#1b2430, #e3e8ef); }}
h2 {{ font-size: 1.1rem; margin: 0; }}
section {{ border: 1px solid var(--line); border-radius: 8px; padding: 1rem; margin: 1rem 0; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; border-top: 1px solid var(--line); }}
pre {{ background: var(--soft); padding: .8rem; border-radius: 6px; overflow-x: auto; font-size: .85rem; }}
code {{ background: var(--soft); padding: .1rem .3rem; border-radius: 4px; }}
a {{ color: light-dark(#0b5fc4, #7ab7ff); }}
</style>
</head>
<body>
<h1>embedctl gateway {version}</h1>
<p>Embeddings over HTTP. OpenAI's clients need only this address, with <code>/v1</code>, as their base URL. A gateway
with keys wants one of them as <code>Authorization: Bearer KEY</code>. For programs: <a href="openapi.json">OpenAPI</a>.
The paths below <code>/v1</code> exist without it too.</p>
<pre>curl ADDRESS/v1/embeddings -H 'content-type: application/json' \\
  -d '{{"model": "MODEL", "input": "A cat sat on the mat."}}'</pre>
{calls}
</body>
</html>
"""
