"""What TASKS may say of our backend, and what is wrong with it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from django.core import checks
from django.utils.module_loading import import_string

from dedupjobs import dispatch, registry
from dedupjobs.exceptions import JobDefinitionError

ALL_ARGUMENTS = "arguments"


def problems(
    alias: str, options: Mapping[str, Any], queues: Iterable[str]
) -> Iterator[checks.Error]:
    """Yield each mistake with its cure and the closest known name."""
    for number, text, hint in _mistakes(options, queues):
        yield checks.Error(f"TASKS[{alias!r}]: {text}", hint=hint, id=f"dedupjobs.{number}")


def _mistakes(options: Mapping[str, Any], queues: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    if not isinstance(options, Mapping):
        yield "E025", f"OPTIONS = {options!r} does not fit.", f"Give a dict: {', '.join(_FITS)}."
        return
    for name in options.keys() - _FITS.keys():
        near = difflib.get_close_matches(str(name), _FITS, 1, 0.5)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(_FITS)}."
        yield "E024", f"OPTIONS[{name!r}] is no option.", hint
    for name, (fits, cure) in _FITS.items():
        if name in options and not fits(options[name]):
            why = _WHY[name](options[name]) if name in _WHY else ""
            yield "E025", f"OPTIONS[{name!r}] = {options[name]!r} does not fit.", why + cure
    there = dispatch.queue_names()  # E004 tells where there is none
    for queue in sorted({*queues, *_mapped(options)} - set(there)) if there else ():
        near = difflib.get_close_matches(queue, there, 1, 0.5)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(there)}."
        yield "E026", f"queue {queue!r} is not in RQ_QUEUES.", hint


def _mapped(options: Mapping[str, Any]) -> list[str]:
    levels = options.get("priorities")
    return list(levels.values()) if _is_levels(levels) and levels else []


def _is_key(value: Any) -> bool:
    if isinstance(value, str) and value != ALL_ARGUMENTS:
        try:
            value = import_string(value)
        except ImportError:
            return False
    return value is None or value == ALL_ARGUMENTS or callable(value)


def _is_window(value: Any) -> bool:
    try:
        registry.window(value, "OPTIONS")
    except JobDefinitionError:
        return False
    return True


def _is_levels(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        type(level) is int and isinstance(queue, str) for level, queue in value.items()
    )


def modules(options: Mapping[str, Any]) -> list[str]:
    """Return the modules to import; a check tells of those that are none."""
    given = options.get("modules", ())
    return [path for path in given if _is_module(path)] if isinstance(given, (list, tuple)) else []


def _is_modules(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_module, value))


def _is_module(path: Any) -> bool:
    """Whether there is such a module; raises what a package on the way to it raises."""
    if not (isinstance(path, str) and all(part.isidentifier() for part in path.split("."))):
        return False
    try:
        return path in sys.modules or find_spec(path) is not None
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):
            raise
        return False


def _no_modules(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        missing = [repr(path) for path in value if not _is_module(path)]
        return f"There is no module {', '.join(missing)}. "
    return f"One path is a list, too: [{value!r}]. " if isinstance(value, str) else ""


def _is_job(value: Any) -> bool:
    return not _no_job(value)


def _no_job(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "It is no dict. "
    try:
        registry.options(value, "job")
    except (JobDefinitionError, TypeError, ValueError) as error:
        text = str(error).removeprefix("job: ")
        return f"{text} " if text.endswith("?") else f"{text}. "
    return ""


_FITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "key": (_is_key, f'Give None, "{ALL_ARGUMENTS}", a function of the arguments, or its path.'),
    "unique_for": (_is_window, "Give FOREVER, seconds, a timedelta, or None."),
    "priorities": (_is_levels, 'Give {lowest priority: queue}, for example {10: "high"}.'),
    "modules": (_is_modules, 'Give module paths, for example ["config.mails"].'),
    "job": (_is_job, 'Give options of @job, for example {"max_attempts": 3}.'),
}
_WHY: dict[str, Callable[[Any], str]] = {"modules": _no_modules, "job": _no_job}
"""What exactly does not fit, where that is only a part."""
