"""The arguments of a task's call: how they are stored, and given back as they were passed."""

from __future__ import annotations

import inspect
from typing import Any

from dedupjobs import keys

SHAPE = "_call"  # the argument that remembers how the others were passed


def shape_of(args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the argument that remembers which of the others were passed, and how."""
    return {SHAPE: [len(args), sorted(kwargs)]}


def passed(task: Any, text: str) -> tuple[list[Any], dict[str, Any]]:
    """
    Return args and kwargs as the call had them, from what is stored.

    Empty where they were pruned; without those that the function no longer takes.
    """
    values = keys.decode(text) if text else {}
    count, names = values.pop(SHAPE, None) or [0, sorted(values)]
    signature = signature_of(task)
    bound = inspect.BoundArguments(signature, values)
    rest = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
    named = {**values, **values.get(rest, {})}
    return list(bound.args[:count]), {name: named[name] for name in names if name in named}


def signature_of(task: Any) -> inspect.Signature:
    """Return the function's signature without its context, and with SHAPE."""
    signature = inspect.signature(task.func)
    parameters = list(signature.parameters.values())[1 if task.takes_context else 0 :]
    at = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_KEYWORD), len(parameters))
    parameters.insert(at, keys.Hidden(SHAPE, keys.Hidden.KEYWORD_ONLY, default=None))
    return signature.replace(parameters=parameters)
