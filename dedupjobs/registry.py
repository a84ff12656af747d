"""
The jobs this process knows, by name.

``@job`` turns a function into a frozen ``Job``. Modules called ``jobs`` of every installed app
are imported at start (DEDUPJOBS["AUTODISCOVER"]), so that a web process and a worker agree.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Never, NoReturn, ParamSpec, TypeVar

from django.apps import apps

from dedupjobs import conf, keys, slots
from dedupjobs.backoff import Backoff, Constant, Exponential
from dedupjobs.exceptions import ArgumentError, JobDefinitionError, UnknownJob

if TYPE_CHECKING:
    from dedupjobs.client import Outcome
    from dedupjobs.models import Status

P = ParamSpec("P")
R = TypeVar("R")

FOREVER = timedelta.max
"""``unique_for=FOREVER``: a key that has succeeded never runs again."""

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
SHORTEST, LONGEST = 0.1, 366 * 86_400.0  # seconds that an option may say
LONGEST_WINDOW = timedelta(days=36_525)  # a century; databases end at the year 9999
LONGEST_NAME, LONGEST_TEXT = 200, 100  # characters that the columns hold

_UNSET: Any = object()
_jobs: dict[str, Job[..., Any]] = {}
_former: dict[str, Job[..., Any]] = {}
_limited: set[str] = set()
_leases: dict[str, float] = {}
_missing: set[str] = set()  # what the finders did not find
_outside: set[str] = set()  # names that no app has given its label

finders: list[Callable[[str], None]] = []
"""Asked for a name that a row has and nothing has registered: each may load its module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a job behaves; durations in seconds. ``None`` as time-out: no end."""

    queue: str = "default"
    max_attempts: int = 5
    backoff: Backoff = field(default_factory=Exponential)
    retry_on: tuple[type[Exception], ...] = (Exception,)
    give_up_on: tuple[type[Exception], ...] = ()
    timeout: float | None = 180.0
    lease: float = 60.0
    stall_after: float | None = None
    on_conflict: str = "return"
    on_mismatch: str = "raise"
    on_dead: str = "reopen"
    on_lost: str = "retry"
    max_lost: int = 3
    on_redis_error: str = "database"
    concurrency_control: str = "pessimistic"
    atomic: bool = False
    batch: bool | str = True
    debounce: float | None = None
    max_wait: float | None = None
    retain_for: float = 30 * 86_400.0
    every: float | None = None
    cron: str | None = None
    catch_up: str = "latest"

    @property
    def beat_every(self) -> float:
        """Seconds between two heartbeats: a sixth of the lease."""
        return self.lease / 6

    @property
    def takes_lock(self) -> bool:
        """Whether a Redis lock is taken before a row is claimed."""
        return self.concurrency_control == "pessimistic"

    @property
    def needs_lock(self) -> bool:
        """Whether it does not run while no lock can be had."""
        return self.takes_lock and self.on_redis_error != "database"

    @property
    def gathers(self) -> bool:
        """Whether successes of a batch may wait to be written together."""
        return self.batch == "group"

    @property
    def newest_wins(self) -> bool:
        """Whether a call on an active key changes what will run, so that no mismatch is tested."""
        return self.on_conflict in ("replace", "rerun") or self.debounce is not None

    @property
    def scheduled(self) -> bool:
        """Whether the coordinator enqueues this job by the clock."""
        return self.every is not None or self.cron is not None


USUAL_LEASE = Options().lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """
    One call of a job, bound to its signature: what is to be stored.

    ``run_after``: an aware datetime, or seconds from now by the database's clock; None: now.
    ``traceparent``: the W3C trace context of the call, or empty.
    """

    name: str
    queue: str
    key_hash: str
    key: str
    scope: str
    args: str
    fingerprint: str
    run_after: datetime | float | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Invalidated:
    """An application's cache entry that depends on a job: its alias, and how its key is made."""

    alias: str
    key_of: Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Concurrency:
    """
    How many runs there may be at a time: of the job, or of the group that ``group_of`` its
    arguments makes. ``limit``: None: as many as a live control says.
    """

    limit: int | None
    group_of: Callable[[Mapping[str, Any]], str] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Job(Generic[P, R]):
    """
    A registered function. Calling it calls the plain function; ``enqueue`` queues a run.

    ``unique_for`` is how long a success holds the key: seconds, FOREVER, or None for "only
    while active". ``key_maker`` is None for a job without deduplication.
    """

    name: str
    aliases: tuple[str, ...]
    func: Callable[P, R]
    signature: inspect.Signature
    key_maker: keys.KeyMaker | None
    unique_for: timedelta | None
    namespace: str
    scope: str
    fingerprint: tuple[str, ...] | None
    invalidates: tuple[Invalidated, ...]
    options: Options
    concurrency: Concurrency | None = None
    is_variadic: bool = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.func(*args, **kwargs)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Outcome:
        """Make sure that this call runs once; always returns an Outcome that says what is."""
        return Variant(job=self).enqueue(*args, **kwargs)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Outcome:
        """Enqueue from async code."""
        return await Variant(job=self).aenqueue(*args, **kwargs)

    def enqueue_many(self, calls: Iterable[Mapping[str, Any]]) -> list[Outcome]:
        """Enqueue one call per dict of keyword arguments; outcomes come in the same order."""
        return Variant(job=self).enqueue_many(calls)

    def run_now(self, *args: P.args, **kwargs: P.kwargs) -> Outcome:
        """
        Run this call here and now if its key is free: same rows, same attempts, no queue.

        While the job is paused, or no lock can be had under on_redis_error="wait", a worker runs
        it later: the outcome is CREATED, and its job PENDING.
        """
        return Variant(job=self).run_now(*args, **kwargs)

    def status(self, *args: Any, **kwargs: Any) -> Status | None:
        """
        Return how the job with this key stands, or None if there is none.

        Only the arguments that stand in the key are needed. The answer may be L1_TTL old.
        """
        return Variant(job=self).status(*args, **kwargs)

    async def astatus(self, *args: Any, **kwargs: Any) -> Status | None:
        """As ``status``, from async code."""
        return await Variant(job=self).astatus(*args, **kwargs)

    def result(self, *args: Any, **kwargs: Any) -> Any:
        """
        Return what the job with this key has returned, without waiting; as old as ``status``.

        ResultTimeout: it has not ended yet. NoResult: there is none, or no such key.
        """
        return Variant(job=self).result(*args, **kwargs)

    async def aresult(self, *args: Any, **kwargs: Any) -> Any:
        """As ``result``, from async code."""
        return await Variant(job=self).aresult(*args, **kwargs)

    def using(
        self,
        *,
        queue_name: str | None = None,
        run_after: datetime | timedelta | float | None = None,
        key: str | None = None,
    ) -> Variant:
        """
        Return this job with other settings for some calls: ``job.using(...).enqueue(...)``.

        ``run_after``: an aware datetime, or a delay as a timedelta or seconds. ``key``: text that
        stands for the whole key instead of the job's ``key=``, however long.
        """
        return Variant(
            job=self,
            queue=None if queue_name is None else _text(queue_name, "queue_name"),
            run_after=_moment(run_after),
            key=None if key is None else whole_key(key, "key"),
        )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the call's arguments by name with defaults applied; TypeError if they misfit."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}{keys.visible(self.signature)}: {error}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def call_of(
        self, values: Mapping[str, Any], variant: Variant | None = None, *, unkeyed: str
    ) -> Call:
        """Return what is stored for these arguments; without a key, ``unkeyed`` is hashed."""
        variant = variant or Variant(job=self)
        text = keys.encode(values)
        scope = keys.scope_of(values[self.scope], self.scope) if self.scope else ""
        identity = self._identity(values, scope, variant.key, unkeyed)
        return Call(
            name=self.name,
            queue=variant.queue or self.options.queue,
            key_hash=identity.key_hash,
            key=identity.key,
            scope=scope,
            args=text,
            fingerprint=keys.fingerprint(values, self.fingerprint),
            run_after=variant.run_after,
        )

    def _identity(
        self, values: Mapping[str, Any], scope: str, key: str | None, unkeyed: str
    ) -> keys.Identity:
        # The oldest name: a job that was renamed keeps its keys.
        owner = self.namespace or (self.aliases[0] if self.aliases else self.name)
        if key is not None:
            return keys.identity(scope=scope, owner=owner, parts=[["key", key]], text=key)
        if self.key_maker is None:
            return keys.identity(scope=scope, owner=owner, parts=[unkeyed], text="")
        parts, text = self.key_maker.make(values)
        return keys.identity(scope=scope, owner=owner, parts=parts, text=text)

    def identity_of(self, kwargs: dict[str, Any]) -> str:
        """Return the hash of the key that a call with these arguments has."""
        values = self.bind((), kwargs)
        return self.call_of(values, unkeyed="").key_hash

    def key_hash_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: str | None) -> str:
        """Return the hash of a key by those arguments that stand in it; others may be missing."""
        if self.key_maker is None and key is None:
            raise ArgumentError(f"{self.name} has no key, so nothing can be asked by it")
        try:
            bound = self.signature.bind_partial(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}{keys.visible(self.signature)}: {error}") from None
        bound.apply_defaults()
        values = bound.arguments
        try:
            scope = keys.scope_of(values[self.scope], self.scope) if self.scope else ""
            return self._identity(values, scope, key, "").key_hash
        except KeyError as error:
            raise ArgumentError(
                f"{self.name}: argument {error} stands in the key or names the tenant; give it"
            ) from None

    def invalidated_keys(self, args: str) -> Iterator[tuple[str, str]]:
        """Yield (cache alias, key) of the application's entries that depend on these arguments."""
        values = keys.decode(args) if self.invalidates else {}
        for entry in self.invalidates:
            yield entry.alias, entry.key_of(values)

    def bound(self, text: str) -> inspect.BoundArguments:
        """Return stored arguments ready for the call; ArgumentError if they no longer fit."""
        values = keys.decode(text)
        if extra := values.keys() - self.signature.parameters.keys():
            raise ArgumentError(f"{self.name} no longer takes {', '.join(sorted(extra))}")
        bound = inspect.BoundArguments(self.signature, values)
        if len(values) == len(self.signature.parameters) and not self.is_variadic:
            return bound
        try:
            self.signature.bind(*bound.args, **bound.kwargs)
        except TypeError as error:
            raise ArgumentError(f"{self.name}{keys.visible(self.signature)}: {error}") from None
        bound.apply_defaults()
        return bound

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute in ("delay", "apply_async", "send", "enqueue_on_commit"):
            raise AttributeError(
                f"{self.name}.{attribute}() does not exist; call .enqueue(...), which waits for "
                "the commit by itself"
            )
        raise AttributeError(f"'Job' object has no attribute {attribute!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A job, and what is different for some calls of it; made by ``Job.using``."""

    job: Job[..., Any]
    queue: str | None = None
    run_after: datetime | float | None = None
    key: str | None = None

    # Imported when called: jobs are decorated before models can load.

    def enqueue(self, *args: Any, **kwargs: Any) -> Outcome:
        """As ``Job.enqueue``."""
        from dedupjobs import client  # noqa: PLC0415

        return client.enqueue(self, args, kwargs)

    async def aenqueue(self, *args: Any, **kwargs: Any) -> Outcome:
        """As ``Job.aenqueue``."""
        from dedupjobs import client  # noqa: PLC0415

        return await client.aenqueue(self, args, kwargs)

    def enqueue_many(self, calls: Iterable[Mapping[str, Any]]) -> list[Outcome]:
        """As ``Job.enqueue_many``."""
        from dedupjobs import client  # noqa: PLC0415

        return client.enqueue_many(self, calls)

    def run_now(self, *args: Any, **kwargs: Any) -> Outcome:
        """As ``Job.run_now``."""
        from dedupjobs import inline  # noqa: PLC0415

        return inline.run_now(self, args, kwargs)

    def status(self, *args: Any, **kwargs: Any) -> Status | None:
        """As ``Job.status``."""
        from dedupjobs import client  # noqa: PLC0415

        return client.status(self, args, kwargs)

    async def astatus(self, *args: Any, **kwargs: Any) -> Status | None:
        """As ``Job.astatus``."""
        from dedupjobs import client  # noqa: PLC0415

        return await client.astatus(self, args, kwargs)

    def result(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Job.result``."""
        from dedupjobs import client  # noqa: PLC0415

        return client.result(self, args, kwargs)

    async def aresult(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Job.aresult``."""
        from dedupjobs import client  # noqa: PLC0415

        return await client.aresult(self, args, kwargs)


def job(  # noqa: PLR0913 - the options of a decorator
    *misplaced: Never,
    key: str | tuple[str, ...] | Callable[..., Any] | None = _UNSET,
    unique_for: timedelta | float | None = _UNSET,
    name: str | None = None,
    aliases: tuple[str, ...] = (),
    namespace: str = "",
    scope: str = "",
    fingerprint: tuple[str, ...] | None = None,
    invalidates: tuple[str | tuple[str, str], ...] = (),
    concurrency: int | str | tuple[str, int] | None = None,
    **options: Any,
) -> Callable[[Callable[P, R]], Job[P, R]]:
    """
    Register the decorated function as a job.

    ``key``: what makes two calls the same work: a template over the arguments
    (``"payment:{order_id}"``), a tuple of argument names, a function of the arguments, or None
    for no deduplication. ``unique_for``: how long a success holds the key. ``scope``: the
    argument that names the tenant. ``aliases``: former names of this job, the oldest first: the
    oldest one stands in the keys, so that a renamed job keeps them. ``namespace``: jobs with the
    same one share their keys. ``fingerprint``: the arguments that must be equal when the
    key is (all by default). ``invalidates``: templates of cache keys, or (alias, template), that
    are deleted when the job is final or queued again. ``concurrency``: how many runs there may be
    at a time: ``3`` of this job, ``("tenant:{tenant_id}", 2)`` of each group that the template
    makes of the arguments, or the template alone, where controls set the limits. Jobs with the
    same template share their groups. Other options: the fields of ``Options``.
    """

    if misplaced:
        raise JobDefinitionError(
            f"@job was given {misplaced[0]!r}: it takes keywords only. Write "
            '@job(key="payment:{order_id}", unique_for=FOREVER), or @job(key=None) for no '
            "deduplication"
        )

    def register(func: Callable[P, R]) -> Job[P, R]:
        chosen = _fitting(name or _default_name(func))
        signature = inspect.signature(func)
        made: Job[P, R] = Job(
            name=chosen,
            aliases=tuple(_text(alias, f"{chosen}: aliases") for alias in aliases),
            func=func,
            signature=signature,
            key_maker=_key_maker(key, signature, chosen),
            unique_for=_unique_for(key, unique_for, chosen),
            namespace=namespace,
            scope=_argument(scope, signature, chosen),
            fingerprint=_arguments(fingerprint, signature, chosen),
            invalidates=tuple(_invalidated(i, signature, chosen) for i in _tuple(invalidates)),
            concurrency=_concurrency(concurrency, signature, chosen),
            options=_options(options, chosen),
            is_variadic=any(p.kind in VARIADIC for p in signature.parameters.values()),
        )
        if made.options.atomic and inspect.iscoroutinefunction(inspect.unwrap(func)):
            raise JobDefinitionError(
                f"{chosen}: a coroutine reaches the database from another thread, by another "
                "connection, so atomic=True could not undo its writes; write it without async"
            )
        _check_group(made.options, chosen)
        return _add(made)

    return register


def _check_group(options: Options, job: str) -> None:
    if options.batch == "group" and (options.atomic or options.on_lost == "hold"):
        raise JobDefinitionError(
            f"{job}: batch='group' is for jobs that may be repeated: after a crash, those that "
            "had ended within the last moment run again. It can not go with atomic=True or "
            "on_lost='hold'."
        )


def get(name: str) -> Job[..., Any]:
    """Return the job of this name, or raise UnknownJob naming what is known."""
    if found := find(name):
        return found
    known = ", ".join(sorted(_jobs)) or "none"
    raise UnknownJob(
        f"No job is registered as {name!r} in this process (known: {known}). Put it in its "
        "app's jobs.py, keep its old name with name=, or deploy the code that has it."
    )


def find(name: str) -> Job[..., Any] | None:
    """Return the job of this name, or of this former name, or None; ask the finders for it."""
    return loaded(name) or _found(name)


def loaded(name: str) -> Job[..., Any] | None:
    """Return the job of this name, or of this former name, if its module is loaded."""
    return _jobs.get(name) or _former.get(name)


def _found(name: str) -> Job[..., Any] | None:
    if name in _missing:
        return None
    for finder in finders:
        try:
            finder(name)
        except Exception:  # noqa: S112 - whoever asks says that nobody knows the name
            continue
        if made := loaded(name):
            return made
    _missing.add(name)
    return None


def window(value: Any, what: str) -> timedelta | None:
    """Return ``unique_for`` as a timedelta; JobDefinitionError if it is none."""
    return _unique_for("any", value, what)


def options(given: Mapping[str, Any], what: str) -> Options:
    """Return options of ``@job`` as they are kept; JobDefinitionError names a wrong one."""
    return _options(dict(given), what)


def every() -> list[Job[..., Any]]:
    """Return all jobs of this process, sorted by name."""
    return [_jobs[name] for name in names()]


def names() -> list[str]:
    """Return the names of all jobs of this process."""
    return sorted(_jobs)


def outside_apps() -> list[Job[..., Any]]:
    """Return the jobs that are named by their modules, since no installed app has these."""
    return [job for job in every() if job.name in _outside]


def near(name: str) -> str:
    """Return the known name that is most like this one, or an empty string."""
    found = difflib.get_close_matches(name, _jobs, 1, 0.6)
    return found[0] if found else ""


def by_name() -> dict[str, Job[..., Any]]:
    """Return all jobs of this process by their names, present and former ones."""
    return {**_former, **_jobs}


def options_of(name: str) -> Options:
    """Return the options of the job called ``name``, or the defaults if it is not known here."""
    found = find(name)
    return found.options if found else _options({}, name)


def in_need_of_locks() -> tuple[str, ...]:
    """Return the names, present and former, of jobs that do not run while no lock can be had."""
    needy = (job for job in _jobs.values() if job.options.needs_lock)
    return tuple(sorted(name for job in needy for name in (job.name, *job.aliases)))


def limited() -> tuple[str, ...]:
    """Return the names, present and former, of jobs that declare ``concurrency``."""
    return tuple(sorted(_limited))


def leases() -> Mapping[str, float]:
    """Return the leases of jobs that have not the usual one, by names, present and former."""
    return _leases


def forget(name: str) -> None:
    """Remove a job, for tests that define some."""
    gone = _jobs.pop(name, None)
    _outside.discard(name)
    for alias in gone.aliases if gone else ():
        _former.pop(alias, None)
    _forget_facts((name, *(gone.aliases if gone else ())))


def _forget_facts(names: Iterable[str]) -> None:
    for name in names:
        _limited.discard(name)
        _leases.pop(name, None)


# ---- what the decorator checks


def _add(made: Job[P, R]) -> Job[P, R]:
    there = _jobs.get(made.name)
    if there and (there.func.__module__, there.func.__qualname__) != (
        made.func.__module__,
        made.func.__qualname__,
    ):
        raise JobDefinitionError(
            f"{made.name} is registered twice, by {there.func.__module__} and "
            f"{made.func.__module__}; give one of them another name="
        )
    for name in (made.name, *made.aliases):
        other = loaded(name)
        if other is not None and other.name != made.name:
            raise JobDefinitionError(
                f"{made.name}: {name!r} is a name of {other.name} already, now or formerly; two "
                "jobs would answer for each other's keys"
            )
    _jobs[made.name] = made
    names = (made.name, *made.aliases)
    _forget_facts(names)
    if made.concurrency is not None:
        _limited.update(names)
    if made.options.lease != USUAL_LEASE:
        _leases.update(dict.fromkeys(names, made.options.lease))
    _missing.clear()
    _former.update(dict.fromkeys(made.aliases, made))
    return made


def _default_name(func: Callable[..., Any]) -> str:
    app = apps.get_containing_app_config(func.__module__) if apps.apps_ready else None
    if "<locals>" in func.__qualname__ or "<lambda>" in func.__qualname__:
        raise JobDefinitionError(
            f"{func.__qualname__} is local to a function, so a worker can not find it; define it "
            "in its app's jobs.py"
        )
    if app is not None:
        return f"{app.label}.{func.__name__}"
    name = f"{func.__module__}.{func.__name__}"
    _outside.add(name)
    return name


def _key_maker(key: Any, signature: inspect.Signature, job: str) -> keys.KeyMaker | None:
    if key is _UNSET:
        raise JobDefinitionError(
            f"{job}: key= is missing. Name what makes two calls the same work, for example "
            'key="payment:{order_id}", or write key=None for no deduplication.'
        )
    return None if key is None else keys.KeyMaker.of(key, signature, job)


def _unique_for(key: Any, value: Any, job: str) -> timedelta | None:
    if key is None:
        if value not in (_UNSET, None):
            raise JobDefinitionError(f"{job}: unique_for={value!r} has no meaning with key=None")
        return None
    if value is _UNSET:
        raise JobDefinitionError(
            f"{job}: unique_for= is missing. How long does a success hold the key? FOREVER, a "
            "timedelta, or None for only while the job is active."
        )
    if value is None or value is FOREVER:
        return value
    window = value if isinstance(value, timedelta) else timedelta(seconds=_number(value, job))
    if not timedelta(0) < window <= LONGEST_WINDOW:
        raise JobDefinitionError(
            f"{job}: unique_for={value!r}; give more than 0 and at most {LONGEST_WINDOW.days:,} "
            "days, FOREVER, or None for only while active"
        )
    return window


def _argument(name: str, signature: inspect.Signature, job: str) -> str:
    parameters = keys.visible(signature).parameters
    if name and name not in parameters:
        known = ", ".join(parameters) or "none"
        raise JobDefinitionError(f"{job}: scope={name!r} is no argument; there are: {known}")
    return name


def _arguments(
    names: tuple[str, ...] | None, signature: inspect.Signature, job: str
) -> tuple[str, ...] | None:
    parameters = keys.visible(signature).parameters
    for name in names or ():
        if name not in parameters:
            raise JobDefinitionError(f"{job}: fingerprint names {name!r}, which is no argument")
    return names


def _tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _invalidated(entry: Any, signature: inspect.Signature, job: str) -> Invalidated:
    alias, template = ("default", entry) if isinstance(entry, str) else entry
    where = f"invalidates={entry!r}"
    if not isinstance(template, str) or not template or not isinstance(alias, str):
        raise JobDefinitionError(f"{job}: {where}: give a template, or (cache alias, template)")
    return Invalidated(alias, keys.text_template(template, signature, job, where))


def _concurrency(given: Any, signature: inspect.Signature, job: str) -> Concurrency | None:
    if given is None:
        return None
    template, limit = given if isinstance(given, tuple) and len(given) == 2 else (given, None)  # noqa: PLR2004
    where = f"concurrency={given!r}"
    if type(given) is int and given >= 1:
        return Concurrency(given, None)
    if not (isinstance(template, str) and template) or not (
        limit is None or (type(limit) is int and limit >= 1)
    ):
        raise JobDefinitionError(
            f"{job}: {where}; give a whole number of at least 1, a template such as "
            '"tenant:{tenant_id}", or both: ("tenant:{tenant_id}", 2). To stop a job, pause it'
        )
    return Concurrency(limit, keys.text_template(template, signature, job, where))


def _options(given: dict[str, Any], job: str) -> Options:
    defaults = {o: v for o, v in conf.option_defaults().items() if not _wrong_option(o, v)}
    for option, value in given.items():
        if wrong := _wrong_option(option, value, f"{job}: "):
            raise JobDefinitionError(wrong)
    if given.get("concurrency_control") == "optimistic" and "on_redis_error" in given:
        raise JobDefinitionError(
            f"{job}: on_redis_error={given['on_redis_error']!r} says what to do without a lock, "
            "and concurrency_control='optimistic' takes none; remove one of the two"
        )
    merged = {**defaults, **given}
    return Options(**{o: _OPTION[o](value, f"{job}: {o}") for o, value in merged.items()})


def wrong_defaults() -> list[str]:
    """Return a sentence per mistake in DEDUPJOBS["DEFAULTS"], which is left out until corrected."""
    where = "DEDUPJOBS['DEFAULTS']: "
    found = (_wrong_option(o, value, where) for o, value in conf.option_defaults().items())
    return [wrong for wrong in found if wrong]


def _wrong_option(option: str, value: Any, where: str = "") -> str:
    """Return what is wrong with an option, or an empty string."""
    if option not in _OPTION:
        near = difflib.get_close_matches(str(option), _OPTION, 1, 0.6)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(_OPTION))}"
        return f"{where}unknown option {option}; {hint}"
    try:
        _OPTION[option](value, f"{where}{option}")
    except JobDefinitionError as error:
        return str(error)
    return ""


def _one_of(*choices: str) -> Callable[[Any, str], str]:
    def check(value: Any, what: str) -> str:
        if value not in choices:
            raise JobDefinitionError(f"{what}={value!r} is not one of {choices}")
        return str(value)

    return check


def _whole(value: Any, what: str) -> int:
    if type(value) is not int or value < 1:
        raise JobDefinitionError(f"{what}={value!r}; give a whole number of at least 1")
    return value


def _fitting(name: str) -> str:
    if len(name) > LONGEST_NAME:
        raise JobDefinitionError(
            f"{name[:60]}…: a name may have {LONGEST_NAME} characters, not {len(name)}; give name="
        )
    return name


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_TEXT:
        raise JobDefinitionError(
            f"{what}={value!r}; give a string of 1 to {LONGEST_TEXT} characters"
        )
    return value


def whole_key(value: Any, what: str) -> str:
    """Return the key of a call as it was given, however long: the hash covers all of it."""
    if not isinstance(value, str) or not value.strip():
        raise JobDefinitionError(
            f"{what}={value!r}; give text that makes two calls the same work, as 'payment:7'"
        )
    return value


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise JobDefinitionError(f"{what}={value!r}; give True or False")
    return value


def _batch(value: Any, what: str) -> bool | str:
    if isinstance(value, bool):
        return value
    if value == "group":
        return "group"
    raise JobDefinitionError(f"{what}={value!r}; give True, False or 'group'")


def _lease(value: Any, what: str) -> float:
    if value is None:
        raise JobDefinitionError(f"{what}=None; a lease must end, or a crash is never seen")
    return _positive(value, what)


def _number(value: Any, job: str) -> float:
    if type(value) not in (int, float) or not abs(value) < LONGEST_WINDOW.total_seconds():
        raise JobDefinitionError(f"{job}: unique_for={value!r} is no number of seconds")
    return float(value)


def _positive_or_none(value: Any, what: str) -> float | None:
    return None if value is None else _positive(value, what)


def _positive(value: Any, what: str) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if type(seconds) not in (int, float) or not SHORTEST <= seconds <= LONGEST:
        raise JobDefinitionError(
            f"{what}={value!r}; give 0.1 s to 366 days, as seconds or a timedelta"
        )
    return float(seconds)


def _exceptions(value: Any, what: str) -> tuple[type[Exception], ...]:
    kinds = value if isinstance(value, tuple) else (value,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise JobDefinitionError(f"{what}={value!r}; give a tuple of Exception classes")
    return kinds


def _cron(value: Any, what: str) -> str | None:
    if value is None or slots.is_cron(value):
        return value  # type: ignore[no-any-return]
    raise JobDefinitionError(f"{what}={value!r} is no cron expression of five fields")


def _moment(value: datetime | timedelta | float | None) -> datetime | float | None:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ArgumentError(f"run_after={value!r} has no time zone; give an aware datetime")
        return value
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if seconds is None:
        return None
    if type(seconds) not in (int, float) or not 0 <= seconds <= 10 * LONGEST:
        raise ArgumentError(f"run_after={value!r}: give an aware datetime or a delay of 0 or more")
    return float(seconds)


def _backoff(value: Any, what: str) -> Backoff:
    if callable(value):
        return value  # type: ignore[no-any-return]
    return Constant(_positive(value, what))


_OPTION: dict[str, Callable[[Any, str], Any]] = {
    "queue": _text,
    "max_attempts": _whole,
    "backoff": _backoff,
    "retry_on": _exceptions,
    "give_up_on": _exceptions,
    "timeout": _positive_or_none,
    "lease": _lease,
    "stall_after": _positive_or_none,
    "on_conflict": _one_of("return", "raise", "replace", "rerun"),
    "on_mismatch": _one_of("raise", "warn", "ignore"),
    "on_dead": _one_of("reopen", "block"),
    "on_lost": _one_of("retry", "hold"),
    "max_lost": _whole,
    "on_redis_error": _one_of("database", "wait", "refuse"),
    "concurrency_control": _one_of("pessimistic", "optimistic"),
    "atomic": _flag,
    "batch": _batch,
    "debounce": _positive_or_none,
    "max_wait": _positive_or_none,
    "retain_for": _positive,
    "every": _positive_or_none,
    "cron": _cron,
    "catch_up": _one_of("latest", "skip", "all"),
}
