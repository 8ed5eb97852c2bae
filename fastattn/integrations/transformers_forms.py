"""What of transformers is recognised: its versions, and functions by their arguments and source.

The other files here replace functions of models, or read what closures hold. Another version may
rename an argument or do the same work elsewhere, so what is not recognised raises.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Callable
from typing import Any

VERSIONS = ("5.23", "5.24")
# Names that differ between models or versions, and the name under which they count as one.
_ALIKE = {r"past_key_values": "cache", r"apply_rotary_pos_emb\w*": "apply_rotary_pos_emb"}
# Keyword arguments of transformers that do not concern attention, or say what the mask also says.
ELSEWHERE = frozenset(
    [
        "encoder_attention_mask",
        "encoder_hidden_states",
        "logits_indices",
        "logits_processor_args",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "sliding_window",
        "use_cache",
    ]
)
_FORMAT = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_LEFT_OUT = {tokenize.COMMENT, tokenize.NL}


def check_version(version: str) -> None:
    """Raise ImportError for a version of transformers that is not among the tested ones."""
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise ImportError(
            f"transformers: got {version}, expected {' or '.join(VERSIONS)}, whose models this "
            "fastattn knows: install one of these or a newer fastattn; or leave the model at "
            "'sdpa' and use fastattn.sdpa()"
        )


def unknown(function: Callable) -> ValueError:
    """The error for a function of a model that is not recognised."""
    name = getattr(function, "__qualname__", function)
    return ValueError(
        f"attn_implementation: got 'fastattn' for a model with {name}"
        f"{inspect.signature(function)}, expected the arguments and the source of transformers "
        f"{' or '.join(VERSIONS)}; leave it at 'eager' or 'sdpa'"
    )


def refuse_unknown(what: str, given: dict[str, Any], known: frozenset[str]) -> None:
    """Raise TypeError for an argument of another name that is neither None nor False."""
    for name, value in given.items():
        if name not in known and value is not None and value is not False:
            raise TypeError(
                f"{name}: got this argument of {what}, which fastattn does not know, expected "
                f"those of transformers {' or '.join(VERSIONS)}; leave this model at 'eager' or "
                "'sdpa'"
            )


@functools.cache
def form(function: Callable) -> str | None:
    """A hash of the names of a function's arguments and of its source, whatever its comments,
    annotations and line breaks; None if it has no source."""
    if (parsed := _source(function)) is None:
        return None
    source, tree = parsed
    body = tree.body[ast.get_docstring(tree) is not None :]
    parameters = inspect.signature(function).parameters.values()
    words = [str(x.replace(annotation=inspect.Parameter.empty)) for x in parameters]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.start >= (body[0].lineno, body[0].col_offset) and token.type not in _LEFT_OUT:
            named = tokenize.tok_name[token.type] if token.type in _FORMAT else token.string
            words.append(named)
    text = " ".join(words)
    for pattern, name in _ALIKE.items():
        text = re.sub(rf"\b{pattern}\b", name, text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def hands_on(function: Callable, method: str, to: str) -> bool:
    """True if what a method returns goes to the function `to` alone, but for reads of shapes."""
    if (parsed := _source(function)) is None:
        return False
    tree = parsed[1]
    parents = {x: y for y in ast.walk(tree) for x in ast.iter_child_nodes(y)}
    made = [x.targets for x in ast.walk(tree) if isinstance(x, ast.Assign) and _is(x.value, method)]
    targets = [x for y in made for z in y for x in ast.walk(z) if isinstance(x, ast.Name)]
    names = {x.id for x in targets}
    uses = [x for x in ast.walk(tree) if isinstance(x, ast.Name) and x.id in names]
    uses = [parents[x] for x in uses if x not in targets]
    calls = sum(_is(x, method) for x in ast.walk(tree))
    return len(made) == calls == 1 and all(
        _is(x, to) or (isinstance(x, ast.Attribute) and x.attr == "shape") for x in uses
    )


def _is(node: ast.AST, name: str) -> bool:
    """Whether this is a call of a function, or a method, of this name."""
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "attr", getattr(node.func, "id", None)) == name


def _source(function: Callable) -> tuple[str, ast.FunctionDef] | None:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):
        return None
    tree = ast.parse(source).body[0]
    return (source, tree) if isinstance(tree, ast.FunctionDef) else None
