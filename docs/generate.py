"""Writes docs/reference.md from the code: `make reference`. A test fails where the two differ."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import django
from django.conf import settings

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference.md"

OPTIONS = {
    "key": "what makes two calls the same work: a template over the arguments, a tuple of argument "
    "names, a function of the arguments, or None for no deduplication",
    "unique_for": "how long a success holds the key: FOREVER, a timedelta or seconds, None for "
    "only while active; not with key=None",
    "name": "registered name; `app_label.function`",
    "aliases": "former names, the oldest first: it stands in the keys",
    "namespace": "jobs with the same one share their keys",
    "scope": "the argument that names the tenant",
    "fingerprint": "the arguments that must be equal when the key is; all",
    "invalidates": "templates of cache keys, or (alias, template), deleted when the job is final "
    "or queued again",
    "concurrency": "how many run at a time: a number, (template, number) by group, or a template "
    "whose limits live controls set",
    "queue": "one of RQ_QUEUES",
    "max_attempts": "failures after which it is DEAD; the first run counts",
    "backoff": "seconds before a retry, or `Exponential(base, factor, cap)`",
    "retry_on": "errors that are retried",
    "give_up_on": "errors that are not, whatever retry_on says",
    "timeout": "seconds of run time; None: no end",
    "lease": "seconds without a beat after which an attempt counts as lost",
    "stall_after": "seconds without activity after which a beating attempt is called silent",
    "on_conflict": "a call on an active key: return, raise, replace, rerun",
    "on_mismatch": "a call with other arguments under a held key: raise, warn, ignore",
    "on_dead": "a call on a DEAD key: reopen, block",
    "on_lost": "after a worker's death: retry, hold",
    "max_lost": "losses after which it is DEAD",
    "on_redis_error": "while no lock can be had: database (run by the row alone), wait, refuse",
    "concurrency_control": "pessimistic: a Redis lock before the claim; optimistic: none",
    "atomic": "function and success share one transaction",
    "batch": "may share messages, claims and transactions; `group`: its successes, too",
    "debounce": "seconds that calls must have stopped for",
    "max_wait": "seconds after the first call at which a debounced job runs at all events",
    "retain_for": "seconds that a final row is kept",
    "every": "seconds between two slots; run by the coordinator",
    "cron": "the same as five fields, read in TIME_ZONE",
    "catch_up": "slots that passed meanwhile: latest, skip, all",
}
"""What options of ``@job`` mean; one that is missing here has a comment behind its field."""

CHECKS = {
    "E001": "A setting in DEDUPJOBS is unknown or can not be meant; the text names the cure.",
    "E030": "A handler of events is for a consumer that INBOX lacks, or for the only one of "
    "several.",
    "E033": "The URLs have a webhook_view() for a consumer that INBOX lacks.",
    "E007": 'RQ["WORKER_CLASS"] is no worker of RQ.',
    "E040": "Two aliases of LOCK_CACHE are one server, which would have two votes.",
    "E041": "An alias of LOCK_CACHE is a replica, which can not write.",
    "E042": "A node of a Redis Cluster is one of several lock servers.",
    "W009": "Two settings, each right, that do not go together.",
    "W020": "Lock servers do not answer, or refuse to write; the text says which, and whether a "
    "majority takes locks.",
    "W021": "The clocks of lock servers differ; the text says what that means.",
}
"""Texts that the code puts together elsewhere."""

INNER = {"bind", "call_of", "identity_of", "key_hash_of", "invalidated_keys", "bound"}
"""Methods that other modules of ours call, and nobody else."""


def page() -> str:
    """Return the whole page."""
    parts = [
        "# Reference",
        "Written by `make reference` from the code, and compared with it by a test.",
        *_section("Settings", _settings()),
        *_section("Options of @job", _options()),
        *_section("What you import", _public()),
        *_section("Events", _events()),
        *_section("Errors", _errors()),
        *_section("States", _states()),
        *_section("Signals", _signals()),
        *_section("Checks", _checks()),
        *_section("Commands", _commands()),
        *_section("Metrics", _metrics()),
    ]
    return "\n\n".join(parts).replace("``", "`") + "\n"


def _section(title: str, parts: Iterable[str]) -> list[str]:
    return [f"## {title}", *parts]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in lines
    )


def _code(value: object) -> str:
    return f"`{value}`"


def _fenced(text: str) -> str:
    return f"~~~text\n{text}\n~~~"


# ---- parts of the page


def _settings() -> Iterator[str]:
    from dedupjobs import conf

    notes = comments(conf)
    yield (
        "Fields of the dict `DEDUPJOBS`. Seconds may be numbers or timedeltas, sizes are bytes. "
        "A wrong one is check E001."
    )
    defaults = conf.Settings()
    rows = [
        (_code(f.name), _code(getattr(defaults, f.name)), notes.get(f.name, ""))
        for f in fields(conf.Settings)
    ]
    yield _table(("setting", "default", "meaning"), rows)
    yield (
        "Beside it: `INSTALLED_APPS` with `django_rq` and `dedupjobs`, `CACHES`, `RQ_QUEUES`, and "
        '`RQ = {"WORKER_CLASS": "dedupjobs.worker.DedupWorker"}`.'
    )


def _options() -> Iterator[str]:
    from dedupjobs import registry

    notes = comments(registry)
    own = inspect.signature(registry.job).parameters.values()
    defaults = registry.Options()
    rows = [
        (p.name, "required" if p.default is registry._UNSET else _code(repr(p.default)))
        for p in own
        if p.kind is p.KEYWORD_ONLY
    ]
    rows += [(f.name, _code(_plain(getattr(defaults, f.name)))) for f in fields(registry.Options)]
    yield "Durations are seconds or timedeltas. [Policies](policies.md) shows them at work."
    yield _table(
        ("option", "default", "meaning"),
        [(_code(name), default, OPTIONS.get(name) or notes[name]) for name, default in rows],
    )


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(v.__name__ for v in value)}{',' if len(value) == 1 else ''})"
    return repr(value)


def _public() -> Iterator[str]:
    import dedupjobs

    for name in dedupjobs.__all__:
        thing = getattr(dedupjobs, name)
        yield f"### {name}"
        if inspect.isclass(thing):
            yield from _class(thing)
        elif callable(thing):
            yield from _callable(name, thing)
        else:
            yield "`timedelta.max`: for `unique_for`, a success answers for ever."


def _events() -> Iterator[str]:
    from dedupjobs import inbox, outbox, routes

    yield "[What they are for, and what holds](events.md)."
    for module, names in (
        (outbox, ("publish", "publish_many")),
        (inbox, ("handler", "take", "receive", "webhook_view")),
    ):
        for name in names:
            function = getattr(module, name)
            yield f"### {module.__name__.rpartition('.')[2]}.{name}"
            yield from _callable(name, function)
    notes = comments(routes)
    for title, kind in (("target", routes.Target), ("consumer", routes.Consumer)):
        yield f"A {title} in settings:"
        rows = [
            (_code(f.name), _code(repr(f.default)), notes.get(f.name) or _taken(f))
            for f in fields(kind)
        ]
        yield _table(("option", "default", "meaning"), rows)


def _taken(field: Any) -> str:
    return str(field.metadata["words"]).rstrip(".")


def _class(kind: type) -> Iterator[str]:
    yield inspect.getdoc(kind) or ""
    rows = []
    for name, given in vars(kind).items():
        member = getattr(kind, name) if isinstance(given, classmethod) else given
        if name.startswith("_") or name in INNER or not _is_public(member):
            continue
        get = getattr(member, "fget", None) or getattr(member, "func", None)
        shown = name if get else f"{name}{_signature(member)}"
        words = inspect.getdoc(get or member) or ""
        rows.append((_code(shown), " ".join(words.split())))
    if rows:
        yield _table(("", ""), rows)


def _is_public(member: object) -> bool:
    own = (
        inspect.isfunction(member)
        or inspect.ismethod(member)
        or isinstance(member, property)
        or hasattr(member, "func")
    )
    return own and not isinstance(member, type)


def _callable(name: str, function: Callable[..., Any]) -> Iterator[str]:
    yield _code(f"{name}{_signature(function)}")
    yield inspect.getdoc(function) or ""


def _signature(function: Any) -> str:
    signature = inspect.signature(getattr(function, "__wrapped__", function))
    shown = [
        p.replace(annotation=p.empty, default=p.default)
        for p in signature.parameters.values()
        if p.name != "self" and p.annotation != "Never"  # which nobody may give
    ]
    plain = str(signature.replace(parameters=shown, return_annotation=signature.empty))
    return re.sub(r"<object object at \w+>", "…", plain)


def _errors() -> Iterator[str]:
    from dedupjobs import exceptions

    yield "All of them in `dedupjobs.exceptions`."
    tree = (inspect.getdoc(exceptions) or "").split("\n\n", 1)[1]
    yield _fenced(tree)


def _states() -> Iterator[str]:
    from dedupjobs import lifecycle, models

    yield "A job's `status`, and the arrows between them ([the guards](design.md)):"
    yield _fenced(_diagram(inspect.getdoc(lifecycle) or ""))
    rows = [(_code(s.value), str(s.label), _sets(models, s)) for s in models.Status]
    yield _table(("status", "shown as", "is"), rows)
    yield "An attempt's `outcome`, written once:"
    yield _table(
        ("outcome", "shown as"), [(_code(o.value), str(o.label)) for o in models.AttemptOutcome]
    )
    notes = comments(models)
    yield "What an enqueue did, `Outcome.kind`:"
    rows = [(_code(k.value), notes.get(k.name, "")) for k in models.Kind]
    yield _table(("kind", "means"), rows)


def _diagram(text: str) -> str:
    """Return the drawing in a docstring: its lines that are set in."""
    lines = text.splitlines()
    drawn = [i for i, line in enumerate(lines) if line.startswith("    ")]
    return inspect.cleandoc("\n".join(["", *lines[drawn[0] : drawn[-1] + 1]]))


def _sets(models: Any, status: Any) -> str:
    names = (("active", models.ACTIVE), ("waiting", models.WAITING), ("final", models.FINAL))
    return ", ".join(name for name, members in names if status in members) or "neither"


def _signals() -> Iterator[str]:
    from dedupjobs import signals

    notes = comments(signals)
    yield (
        "In `dedupjobs.signals`, told after the commit; `sender` is the job's registered name. A "
        "receiver that raises is ignored."
    )
    rows = [
        (_code(name), notes.get(name, ""))
        for name, value in vars(signals).items()
        if isinstance(value, signals.Signal)
    ]
    yield _table(("signal", "keyword arguments"), rows)


def _checks() -> Iterator[str]:
    yield (
        "`E` keeps Django from starting, `W` warns; `…` stands for what differs. Those about "
        "tables need `check --database default`, those about servers `check --deploy`. Each may be "
        'silenced: `SILENCED_SYSTEM_CHECKS = ["dedupjobs.W001"]`.'
    )
    found: dict[str, list[str]] = defaultdict(list)
    for path in [
        ROOT / "dedupjobs" / "checks.py",
        *sorted((ROOT / "dedupjobs/backends").glob("*")),
    ]:
        if path.suffix == ".py":
            for number, text, cure in _named_checks(ast.parse(path.read_text())):
                said = text if text.strip("… .") else CHECKS[number]
                words = f"{said} *{cure}*" if cure.strip("… ") else said
                if words not in found[number]:
                    found[number].append(words)
    for number in CHECKS.keys() - found.keys():
        found[number].append(CHECKS[number])
    yield _table(
        ("check", "says, and its cure"),
        [(_code(f"dedupjobs.{n}"), "<br>".join(found[n])) for n in sorted(found)],
    )


NUMBER = re.compile(r"(?:dedupjobs\.)?([EW]\d{3})")


def _named_checks(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield number, text and cure of each check that a module names."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                named = {k.arg: k.value for k in node.keywords}
                number = _number(named.get("id"))
                if number and node.args:
                    hint = named.get("hint")
                    yield number, _text(node.args[0], function), _text(hint, function)
            elif isinstance(node, ast.Tuple) and node.elts and _number(node.elts[0]):
                number, *words = node.elts
                text, cure = (_text(word, function) for word in words)
                yield _number(number), text, cure


def _number(node: ast.expr | None) -> str:
    found = isinstance(node, ast.Constant) and NUMBER.fullmatch(str(node.value))
    return found[1] if found else ""


def _text(node: ast.expr | None, function: ast.FunctionDef) -> str:
    """Return the text that an expression makes, with an ellipsis for what only a run knows."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(v, function) for v in values)
        case ast.Name():
            return _text(_assigned(node, function), function) or "…"
    return "…" if node is not None else ""


def _assigned(name: ast.Name, function: ast.FunctionDef) -> ast.expr | None:
    """Return what a local name was last set to before it is used."""
    values = [
        (node.lineno, node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and node.lineno < name.lineno
        and [ast.unparse(target) for target in node.targets] == [name.id]
    ]
    return max(values, key=lambda found: found[0])[1] if values else None


def _commands() -> Iterator[str]:
    from django.core.management import get_commands, load_command_class
    from django.core.management.base import BaseCommand

    common = {a.dest for a in BaseCommand().create_parser("", "")._actions}
    for name in sorted(n for n, app in get_commands().items() if app == "dedupjobs"):
        command = load_command_class("dedupjobs", name)
        yield f"### {name}"
        yield command.help
        actions = command.create_parser("manage.py", name)._actions
        rows = [
            (_code(_usage(a)) + (", required" * a.required), " ".join((a.help or "").split()))
            for a in actions
            if a.dest not in common
        ]
        if rows:
            yield _table(("argument", ""), rows)


def _usage(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    if action.choices:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        value = str(action.metavar or (action.dest.upper() if names else action.dest))
    return names if action.nargs == 0 else f"{names} {value}".strip()


def _metrics() -> Iterator[str]:
    from dedupjobs import readings

    yield (
        f"Names have the prefix `{readings.PREFIX}`. [What they mean and cost](observability.md)."
    )
    rows = [
        (_code(f.name), f.kind, ", ".join(f.labels) or "–", f.help)
        for f in sorted(readings.empty(), key=lambda f: (f.kind, f.name))
    ]
    yield _table(("name", "kind", "labels", "what it says"), rows)


def comments(module: ModuleType) -> dict[str, str]:
    """Return the comments behind names that a module assigns, by those names."""
    tokens = list(tokenize.generate_tokens(StringIO(inspect.getsource(module)).readline))
    found, name = {}, ""
    for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        fresh = before.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
        if token.type == tokenize.NAME and after.string in (":", "=") and fresh:
            name = token.string
        elif token.type == tokenize.COMMENT and name and before.type != tokenize.NL:
            found.setdefault(name, token.string.lstrip("# "))
        elif token.type == tokenize.NEWLINE:
            name = ""
    return found


def main() -> None:
    if not settings.configured:
        settings.configure(
            INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "dedupjobs"],
            RQ_QUEUES={"default": {}},
            USE_TZ=True,
        )
        django.setup()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
