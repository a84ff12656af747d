"""
The two tables that are the truth; everything in Redis can be rebuilt from them.

No constraint or index has a condition, since MySQL knows none. Columns that a heartbeat touches
stand in no index, so that PostgreSQL updates them in place.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from django.db import models
from django.utils.translation import gettext_lazy as _

from dedupjobs.clock import UtcDateTimeField


class Status(models.TextChoices):
    """Where a job is in its life; ``lifecycle`` alone moves it."""

    PENDING = "PENDING", _("pending")
    RUNNING = "RUNNING", _("running")
    RETRYING = "RETRYING", _("waiting for a retry")
    SUCCEEDED = "SUCCEEDED", _("succeeded")
    DEAD = "DEAD", _("dead")
    CANCELLED = "CANCELLED", _("cancelled")
    HELD = "HELD", _("held for a person")


WAITING = (Status.PENDING, Status.RETRYING)
ACTIVE = (*WAITING, Status.RUNNING)
FINAL = (Status.SUCCEEDED, Status.DEAD, Status.CANCELLED)


class AttemptOutcome(models.TextChoices):
    """How an attempt ended; NULL while it is open, written once."""

    SUCCEEDED = "SUCCEEDED", _("succeeded")
    FAILED = "FAILED", _("failed")
    TIMED_OUT = "TIMED_OUT", _("timed out")
    LOST = "LOST", _("lost: its worker died or stopped beating")
    INTERRUPTED = "INTERRUPTED", _("interrupted by a shutdown")
    SNOOZED = "SNOOZED", _("snoozed")
    CANCELLED = "CANCELLED", _("cancelled")
    HELD = "HELD", _("held for a person")
    RETURNED = "RETURNED", _("returned before it began")


class Kind(StrEnum):
    """What an enqueue did."""

    CREATED = "CREATED"  # a run will follow
    DUPLICATE = "DUPLICATE"  # the key is active already
    REPLAYED = "REPLAYED"  # the key has succeeded and still holds
    REPLACED = "REPLACED"  # what waited will run with these arguments (on_conflict="replace")
    RERUN = "RERUN"  # it has been begun; these arguments run afterwards (on_conflict="rerun")
    DEBOUNCED = "DEBOUNCED"  # it runs with the newest arguments once calls have stopped (debounce)
    BLOCKED = "BLOCKED"  # a person or a policy stands in the way


class ProcessedJob(models.Model):
    """One business key, for life: a later run reopens the row, nothing inserts a second one."""

    key_hash = models.CharField(_("key hash"), max_length=64)
    key = models.CharField(
        _("key"), max_length=200, blank=True, help_text=_("Readable, cut to 200 characters.")
    )
    scope = models.CharField(_("scope"), max_length=200, blank=True, help_text=_("The tenant."))
    name = models.CharField(_("job"), max_length=200)
    queue = models.CharField(_("queue"), max_length=100)
    status = models.CharField(
        _("status"), max_length=10, choices=Status.choices, default=Status.PENDING
    )
    version = models.PositiveBigIntegerField(
        _("version"), default=0, help_text=_("Grows with every change but joins and beats.")
    )
    generation = models.PositiveIntegerField(
        _("generation"), default=1, help_text=_("Names one intended execution.")
    )
    attempts = models.PositiveIntegerField(
        _("attempts"), default=0, help_text=_("Ever made; the number of the newest one.")
    )
    failures = models.PositiveIntegerField(_("failures"), default=0)
    lost_count = models.PositiveIntegerField(_("lost attempts"), default=0)
    max_attempts = models.PositiveIntegerField(_("override of max_attempts"), null=True, blank=True)
    args = models.TextField(_("arguments"), help_text=_("JSON."))
    fingerprint = models.CharField(_("fingerprint"), max_length=64)
    rerun_args = models.TextField(_("arguments of a waiting rerun"), null=True, blank=True)
    rerun_fingerprint = models.CharField(max_length=64, null=True, blank=True)
    rerun_name = models.CharField(max_length=200, null=True, blank=True)
    rerun_queue = models.CharField(max_length=100, null=True, blank=True)
    run_after = UtcDateTimeField(_("not before"))
    debounce_deadline = UtcDateTimeField(_("debounced until"), null=True, blank=True)
    dispatch_id = models.CharField(
        _("RQ id"), max_length=64, null=True, blank=True, help_text=_("Of the last hand-over.")
    )
    dispatched_at = UtcDateTimeField(_("handed over"), null=True, blank=True)
    cancel_requested = models.BooleanField(_("cancel requested"), default=False)
    hold_requested = models.BooleanField(_("hold requested"), default=False)
    result = models.TextField(_("result"), null=True, blank=True, help_text=_("JSON."))
    error = models.TextField(_("error"), blank=True)
    error_class = models.CharField(
        _("error class"), max_length=200, blank=True, help_text=_("Of the last counted failure.")
    )
    duplicates = models.PositiveBigIntegerField(_("duplicates"), default=0)
    traceparent = models.CharField(max_length=64, blank=True)
    created_at = UtcDateTimeField(_("created"))
    enqueued_at = UtcDateTimeField(_("enqueued"))
    started_at = UtcDateTimeField(_("started"), null=True, blank=True)
    finished_at = UtcDateTimeField(_("finished"), null=True, blank=True)
    unique_until = UtcDateTimeField(
        _("key held until"), null=True, blank=True, help_text=_("Empty once succeeded: for ever.")
    )

    class Meta:
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        default_permissions = ("view",)
        permissions = [
            ("retry_processedjob", _("Can retry jobs")),
            ("cancel_processedjob", _("Can cancel jobs")),
            ("hold_processedjob", _("Can hold and unhold jobs")),
            ("free_processedjob", _("Can free locks and messages")),
            ("purge_processedjob", _("Can purge jobs")),
            ("arguments_processedjob", _("Can view arguments and results")),
        ]
        # Not ``unique=True``, for which Django makes a second index on PostgreSQL.
        constraints = [models.UniqueConstraint(fields=["key_hash"], name="dedupjobs_one_per_key")]
        indexes = [
            models.Index(fields=["status", "dispatched_at", "run_after"], name="dedupjobs_due"),
            # What is out of retention, oldest first; then tombstones, by the end of their window.
            models.Index(
                fields=["name", "status", "finished_at", "unique_until"], name="dedupjobs_final"
            ),
            models.Index(fields=["name", "status", "queue"], name="dedupjobs_name"),
            models.Index(fields=["queue", "status"], name="dedupjobs_queue"),
            models.Index(fields=["scope", "key"], name="dedupjobs_key"),
            # With the pk: rows that were set aside share a mark, and the oldest goes first.
            models.Index(fields=["dispatch_id", "id"], name="dedupjobs_dispatch"),
            models.Index(fields=["duplicates"], name="dedupjobs_duplicates"),
            models.Index(
                fields=["error_class", "status", "name", "queue", "id"], name="dedupjobs_error"
            ),
            models.Index(fields=["enqueued_at"], name="dedupjobs_age"),
            # Those of one state, by age: neither index alone finds old ones among many.
            models.Index(fields=["status", "enqueued_at"], name="dedupjobs_state_age"),
            # PostgreSQL looks prefixes up only in an index of this class; others ignore it.
            models.Index(
                fields=["key"], name="dedupjobs_prefix", opclasses=["varchar_pattern_ops"]
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} {self.key}"

    @property
    def is_tombstone(self) -> bool:
        """Whether only the key is left: arguments, result and attempts were pruned."""
        return not self.args

    @property
    def ended_at(self) -> datetime | None:
        """When a final row ended; None for others. A tombstone keeps it where a due time was."""
        ended: datetime | None = self.finished_at or self.run_after
        return ended if self.status in FINAL else None


class JobAttempt(models.Model):
    """
    One claim of one job. Its primary key is the fencing token.

    The database issues it after the job's row was won, so it grows strictly per key, and it
    survives a wiped Redis. The lease lives here and not on the job, so that a business
    transaction which touches the job's row does not starve the beats.
    """

    job = models.ForeignKey(
        ProcessedJob, models.CASCADE, related_name="attempt_set", db_index=False
    )
    number = models.PositiveIntegerField(_("number"))
    generation = models.PositiveIntegerField(_("generation"))
    owner = models.CharField(_("owner"), max_length=64)
    lease_until = UtcDateTimeField(_("leased until"))
    beat_at = UtcDateTimeField(_("last beat"))
    began_at = UtcDateTimeField(
        _("began"), null=True, blank=True, help_text=_("When the job's own code was started.")
    )
    active_at = UtcDateTimeField(_("last activity"), null=True, blank=True)
    progress = models.TextField(_("progress"), blank=True, help_text=_("JSON [done, total, text]."))
    outcome = models.CharField(
        _("outcome"), max_length=12, choices=AttemptOutcome.choices, null=True, blank=True
    )
    late_ending = models.CharField(
        _("late ending"),
        max_length=12,
        blank=True,
        help_text=_("What it did after it was given up."),
    )
    host = models.CharField(_("host"), max_length=200, blank=True)
    pid = models.PositiveIntegerField(_("pid"), null=True, blank=True)
    rq_id = models.CharField(_("RQ id"), max_length=200, blank=True)
    group_hash = models.CharField(
        _("group"), max_length=64, blank=True, help_text=_("Counts against its concurrency limit.")
    )
    error_class = models.CharField(_("error class"), max_length=200, blank=True)
    error_message = models.TextField(_("error message"), blank=True)
    traceback = models.TextField(_("traceback"), blank=True)
    reason = models.TextField(_("reason"), blank=True)
    lock_wait = models.FloatField(_("lock wait"), null=True, blank=True, help_text=_("Seconds."))
    queue_delay = models.FloatField(
        _("queue delay"), null=True, blank=True, help_text=_("Seconds.")
    )
    run_time = models.FloatField(_("run time"), null=True, blank=True, help_text=_("Seconds."))
    claimed_at = UtcDateTimeField(_("claimed"))
    ended_at = UtcDateTimeField(_("ended"), null=True, blank=True)

    class Meta:
        verbose_name = _("attempt")
        verbose_name_plural = _("attempts")
        default_permissions = ("view",)
        constraints = [
            models.UniqueConstraint(fields=["job", "number"], name="dedupjobs_one_per_number"),
            # One index that PostgreSQL looks a whole owner and the start of one up in.
            models.UniqueConstraint(
                fields=["owner"], name="dedupjobs_one_owner", opclasses=["varchar_pattern_ops"]
            ),
        ]
        indexes = [
            # Finds what is open, and what ended in one minute, without a second index.
            # It holds the job, too, so that lists of lost attempts need not read the rows.
            models.Index(fields=["outcome", "ended_at", "job"], name="dedupjobs_outcome"),
        ]

    def __str__(self) -> str:
        return f"{self.job_id} #{self.number}"


class StepState(models.TextChoices):
    """How far a step is. One that is STARTED by an attempt which has ended is *in doubt*."""

    STARTED = "STARTED", _("started")
    SUCCEEDED = "SUCCEEDED", _("succeeded")
    FAILED = "FAILED", _("failed")


class JobStep(models.Model):
    """
    What is known of one step of one intended execution, for the attempts to come.

    Written by the attempt in ``fence`` alone, while that one is open.
    """

    # No constraint: to check it, MySQL would wait for whoever has just updated the job's row.
    job = models.ForeignKey(
        ProcessedJob,
        models.CASCADE,
        related_name="step_set",
        db_index=False,
        db_constraint=False,
    )
    generation = models.PositiveIntegerField(_("generation"))
    name = models.CharField(_("name"), max_length=100)
    state = models.CharField(_("state"), max_length=10, choices=StepState.choices)
    attempt = models.PositiveIntegerField(
        _("attempt"), help_text=_("The number of the attempt that wrote this.")
    )
    fence = models.PositiveBigIntegerField(_("fence"))
    result = models.TextField(_("result"), null=True, blank=True, help_text=_("JSON."))
    error = models.TextField(_("error"), blank=True)
    started_at = UtcDateTimeField(_("started"))
    ended_at = UtcDateTimeField(_("ended"), null=True, blank=True)

    class Meta:
        verbose_name = _("step")
        verbose_name_plural = _("steps")
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(
                fields=["job", "generation", "name"], name="dedupjobs_one_per_step"
            )
        ]

    def __str__(self) -> str:
        return self.name


class Cause(models.TextChoices):
    """Why a call or a message was turned away."""

    PRODUCER = "producer", _("asked for again while active")
    REPLAY = "replay", _("asked for again after its success")
    REDELIVERY = "redelivery", _("a message for a row with nothing to take")
    RACE = "race", _("a message for a row that another worker runs")
    LEASE = "lease", _("an ending after the lease was lost")


class DuplicateCount(models.Model):
    """How often calls and messages of a job were turned away, by cause, since it was counted."""

    name = models.CharField(_("job"), max_length=200)
    cause = models.CharField(_("cause"), max_length=12, choices=Cause.choices)
    count = models.PositiveBigIntegerField(_("count"), default=0)
    first_at = UtcDateTimeField(_("first"))
    last_at = UtcDateTimeField(_("last"))

    class Meta:
        verbose_name = _("duplicate count")
        verbose_name_plural = _("duplicate counts")
        default_permissions = ("view",)
        constraints = [
            models.UniqueConstraint(fields=["name", "cause"], name="dedupjobs_one_per_cause")
        ]

    def __str__(self) -> str:
        return f"{self.name} {self.cause}: {self.count}"


class DuplicateSample(models.Model):
    """One of the newest duplicates, to see where they come from. The table is bounded."""

    job = models.ForeignKey(ProcessedJob, models.CASCADE, related_name="duplicate_samples")
    cause = models.CharField(_("cause"), max_length=12, choices=Cause.choices)
    at = UtcDateTimeField(_("at"))
    host = models.CharField(_("host"), max_length=200, blank=True)
    pid = models.PositiveIntegerField(_("pid"), null=True, blank=True)
    request_id = models.CharField(_("request"), max_length=200, blank=True)
    detail = models.TextField(_("detail"), blank=True)

    class Meta:
        verbose_name = _("duplicate")
        verbose_name_plural = _("duplicates")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.job_id} {self.cause}"


class Fold(models.Model):
    """A fold of the ledger that was made, so that none is made twice. The table is bounded."""

    token = models.CharField(max_length=64, unique=True)
    at = UtcDateTimeField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.token


class Summary(models.Model):
    """
    What ended in one minute or hour, in one queue and of one job; "" stands for all of them.

    Made from the tables, as often as one likes: each time the same, so nothing counts twice.
    ``delays`` and ``runs`` are histograms (``summaries.EDGES``), ``gauges`` what stood there.
    """

    span = models.PositiveIntegerField(help_text="Seconds.")
    begin = UtcDateTimeField()
    queue = models.CharField(max_length=100, blank=True)
    name = models.CharField(max_length=200, blank=True)
    counted = models.BooleanField(default=False)
    succeeded = models.PositiveBigIntegerField(default=0)
    failed = models.PositiveBigIntegerField(default=0)
    timed_out = models.PositiveBigIntegerField(default=0)
    lost = models.PositiveBigIntegerField(default=0)
    other = models.PositiveBigIntegerField(default=0)
    delays = models.TextField(default="{}")
    runs = models.TextField(default="{}")
    gauges = models.TextField(default="{}")

    class Meta:
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(
                fields=["span", "begin", "queue", "name"], name="dedupjobs_one_summary"
            )
        ]

    def __str__(self) -> str:
        return f"{self.begin} {self.queue} {self.name}"


class Watch(models.Model):
    """
    The last look of a coordinator at the whole; one row, whose primary key is 1.

    Whoever reads it by the database's clock sees that none has looked for a while, also where
    Redis is down. ``score`` and ``penalised`` are what the adaptive backoff goes by.
    """

    at = UtcDateTimeField()
    owner = models.CharField(max_length=64, blank=True)
    score = models.FloatField(default=0.0)
    penalised = models.BooleanField(default=False)
    delay = models.FloatField(default=0.0, help_text="Seconds.")
    growth = models.FloatField(default=0.0)
    memory = models.FloatField(default=0.0)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.at} {self.score}"


class Severity(models.TextChoices):
    """How bad an alert is."""

    CRITICAL = "critical", _("critical")
    WARNING = "warning", _("warning")


class Alert(models.Model):
    """One kind of trouble of one subject (a queue, job, server); raised and cleared in turns."""

    kind = models.CharField(_("kind"), max_length=20)
    subject = models.CharField(_("subject"), max_length=200, blank=True)
    severity = models.CharField(_("severity"), max_length=10, choices=Severity.choices)
    words = models.TextField(_("what it is"))
    cure = models.TextField(_("what to do"), blank=True)
    is_open = models.BooleanField(_("open"), default=False)
    times = models.PositiveIntegerField(_("times raised"), default=0)
    raised_at = UtcDateTimeField(_("raised"), null=True, blank=True)
    seen_at = UtcDateTimeField(_("last seen"), null=True, blank=True)
    cleared_at = UtcDateTimeField(_("cleared"), null=True, blank=True)

    class Meta:
        verbose_name = _("alert")
        verbose_name_plural = _("alerts")
        default_permissions = ("view",)
        constraints = [
            models.UniqueConstraint(fields=["kind", "subject"], name="dedupjobs_one_alert")
        ]
        indexes = [models.Index(fields=["is_open", "raised_at"], name="dedupjobs_open_alerts")]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}".strip()


class AlertNotice(models.Model):
    """A raise or a clear that a channel still has to deliver. The table is bounded."""

    channel = models.CharField(max_length=10)
    body = models.TextField(help_text="JSON.")
    made_at = UtcDateTimeField()
    due_at = UtcDateTimeField()
    tries = models.PositiveIntegerField(default=0)
    error = models.CharField(max_length=300, blank=True)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.channel} {self.made_at}"


class BulkOperation(models.Model):
    """
    One action on all rows that match a filter; a job of ours does it, a page at a time.

    ``cursor`` moves in the transaction of each page, so a run that dies goes on where it was.
    """

    action = models.CharField(_("action"), max_length=12)
    criteria = models.TextField(_("filter"), help_text=_("JSON."))
    by = models.CharField(_("by"), max_length=200)
    user_pk = models.CharField(max_length=64)
    reason = models.TextField(_("reason"))
    limit = models.PositiveIntegerField(_("attempt limit"), null=True, blank=True)
    upto = models.PositiveBigIntegerField(default=0, help_text=_("Rows made later are left alone."))
    cursor = models.PositiveBigIntegerField(default=0)
    total = models.PositiveIntegerField(_("rows"), null=True, blank=True)
    changed = models.PositiveIntegerField(_("changed"), default=0)
    refused = models.PositiveIntegerField(_("left as they were"), default=0)
    stopped_by = models.CharField(_("stopped by"), max_length=200, blank=True)
    note = models.TextField(_("note"), blank=True)
    created_at = UtcDateTimeField(_("created"))
    ended_at = UtcDateTimeField(_("ended"), null=True, blank=True)

    class Meta:
        verbose_name = _("bulk operation")
        verbose_name_plural = _("bulk operations")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.action} by {self.by}"


class BulkRefusal(models.Model):
    """A row that a bulk operation left as it was, and why."""

    bulk = models.ForeignKey(BulkOperation, models.CASCADE, related_name="refusals")
    job_pk = models.PositiveBigIntegerField(_("row"))
    words = models.TextField(_("why"))

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.job_pk}: {self.words}"


class Operation(models.Model):
    """What an operator did to a job: who, why, and what it changed."""

    job = models.ForeignKey(ProcessedJob, models.CASCADE, related_name="operations")
    action = models.CharField(_("action"), max_length=12)
    by = models.CharField(_("by"), max_length=200)
    reason = models.TextField(_("reason"), blank=True)
    before = models.CharField(_("before"), max_length=10, choices=Status.choices)
    after = models.CharField(_("after"), max_length=10, choices=Status.choices)
    at = UtcDateTimeField(_("at"))
    bulk = models.ForeignKey(
        BulkOperation, models.SET_NULL, null=True, blank=True, related_name="operations"
    )

    class Meta:
        verbose_name = _("operation")
        verbose_name_plural = _("operations")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.job_id} {self.action} by {self.by}"


class ControlKind(models.TextChoices):
    """What a control does while it is in force."""

    PAUSE = "pause", _("pause")
    DRAIN = "drain", _("drain")
    FILTER = "filter", _("filter of calls")
    CONCURRENCY = "concurrency", _("concurrency limit")
    LEASE = "lease", _("lease")
    TIMEOUT = "timeout", _("time-out")
    MAX_ATTEMPTS = "max_attempts", _("attempt limit")
    BYPASS_CACHE = "bypass_cache", _("bypass of the status cache")


class Aim(models.TextChoices):
    """What a control is about."""

    JOB = "job", _("job")
    QUEUE = "queue", _("queue")
    KEY = "key", _("exact key")
    PREFIX = "prefix", _("keys that begin with")
    SCOPE = "scope", _("scope")
    GROUP = "group", _("group")
    ALL = "all", _("everything")


class Control(models.Model):
    """
    A lever that a person has pulled, for all processes, until it ends. Ended ones stay: the audit.

    ``place``: sha256 of kind, aim and target while it is in force, so that no two contradict.
    """

    kind = models.CharField(_("kind"), max_length=16, choices=ControlKind.choices)
    aim = models.CharField(_("about"), max_length=8, choices=Aim.choices)
    target = models.CharField(_("target"), max_length=200, blank=True)
    value = models.FloatField(
        _("value"), null=True, blank=True, help_text=_("Seconds, attempts or runs at a time.")
    )
    holds = models.BooleanField(
        _("accept and hold"), default=False, help_text=_("Instead of turning calls away.")
    )
    by = models.CharField(_("by"), max_length=200)
    reason = models.TextField(_("reason"))
    created_at = UtcDateTimeField(_("since"))
    until = UtcDateTimeField(_("until"), null=True, blank=True)
    ended_at = UtcDateTimeField(_("ended"), null=True, blank=True)
    ended_by = models.CharField(_("ended by"), max_length=200, blank=True)
    end_reason = models.TextField(_("why it ended"), blank=True)
    place = models.CharField(max_length=64, unique=True, null=True, blank=True)

    class Meta:
        verbose_name = _("control")
        verbose_name_plural = _("controls")
        default_permissions = ("view",)
        permissions = [("use_control", _("Can add and end controls"))]

    def __str__(self) -> str:
        return f"{self.kind} {self.aim} {self.target}".strip()


class ConcurrencyGroup(models.Model):
    """What a claim locks while it counts who runs in a group. It holds no count itself."""

    group_hash = models.CharField(max_length=64, unique=True)
    made_at = UtcDateTimeField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.group_hash


class EventStatus(models.TextChoices):
    """Where an event is on its way to one target; ``outbox.shelf`` alone moves it."""

    WAITING = "WAITING", _("waiting")
    RETRYING = "RETRYING", _("waiting for a retry")
    BEHIND = "BEHIND", _("behind an earlier one of its key")
    DELIVERED = "DELIVERED", _("delivered")
    DEAD = "DEAD", _("dead")
    DROPPED = "DROPPED", _("dropped by a person")


class OutboxEvent(models.Model):
    """
    An event on its way to one target; several targets have a row each.

    Whoever publishes under a key lines up for it until his commit, so within a key the primary
    keys are in the order of the commits. ``due_at`` is empty while nothing was tried; of what is
    retried it is the next try, of what is over its end: one index serves all three.
    """

    event_id = models.CharField(_("event"), max_length=100)
    target = models.CharField(_("target"), max_length=100)
    name = models.CharField(_("name"), max_length=100)
    key = models.CharField(_("key"), max_length=200, blank=True)
    ordered = models.BooleanField(_("in order"), default=False)
    payload = models.TextField(_("payload"), help_text=_("JSON."))
    status = models.CharField(
        _("status"), max_length=10, choices=EventStatus.choices, default=EventStatus.WAITING
    )
    tries = models.PositiveIntegerField(_("tries"), default=0)
    error = models.TextField(_("last error"), blank=True)
    traceparent = models.CharField(max_length=64, blank=True)
    published_at = UtcDateTimeField(_("published"))
    due_at = UtcDateTimeField(_("next try, or end"), null=True, blank=True)

    class Meta:
        verbose_name = _("event sent")
        verbose_name_plural = _("events sent")
        default_permissions = ("view",)
        permissions = [
            ("retry_outboxevent", _("Can retry and drop events")),
            ("payload_outboxevent", _("Can view payloads of events")),
        ]
        constraints = [
            models.UniqueConstraint(fields=["event_id", "target"], name="dedupjobs_one_event")
        ]
        indexes = [
            # The row's pk decides last, so that those that were never tried stand in their order.
            models.Index(fields=["target", "status", "due_at", "id"], name="dedupjobs_relay"),
            models.Index(fields=["target", "key", "status", "id"], name="dedupjobs_in_order"),
        ]

    def __str__(self) -> str:
        return f"{self.name} {self.event_id}"


class EventLane(models.Model):
    """What those who publish under a key lock on MySQL, which has no locks of a transaction."""

    number = models.PositiveIntegerField(primary_key=True)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.number)


class Turn(models.Model):
    """
    Whose turn it is to send to a target, or to take in for a consumer that keeps an order.

    ``position``: our place in a target's stream; ``again_*``: the rows that are to be sent
    again: those behind one and up to another, delivered since a moment.
    """

    name = models.CharField(max_length=120)
    owner = models.CharField(max_length=64, blank=True)
    until = UtcDateTimeField()
    position = models.CharField(max_length=64, blank=True)
    again_after = models.PositiveBigIntegerField(null=True, blank=True)
    again_to = models.PositiveBigIntegerField(null=True, blank=True)
    again_since = UtcDateTimeField(null=True, blank=True)

    class Meta:
        default_permissions = ()
        constraints = [models.UniqueConstraint(fields=["name"], name="dedupjobs_one_turn")]

    def __str__(self) -> str:
        return self.name


class MessageStatus(models.TextChoices):
    """What became of a message that a consumer got; ``inbox.marks`` alone moves it."""

    APPLIED = "APPLIED", _("applied")
    RETRYING = "RETRYING", _("waiting for a retry")
    BEHIND = "BEHIND", _("behind an earlier one of its key")
    HELD = "HELD", _("held for a person")
    DROPPED = "DROPPED", _("dropped by a person")


class InboxMessage(models.Model):
    """
    The mark that a consumer has applied an event, made in one transaction with the effect.

    Of a message that is not applied yet the payload stands here, so that it needs no stream.
    """

    consumer = models.CharField(_("consumer"), max_length=100)
    event_id = models.CharField(_("event"), max_length=100)
    name = models.CharField(_("name"), max_length=100, blank=True)
    key = models.CharField(_("key"), max_length=200, blank=True)
    payload = models.TextField(_("payload"), blank=True, help_text=_("JSON, until it is applied."))
    status = models.CharField(
        _("status"), max_length=10, choices=MessageStatus.choices, default=MessageStatus.APPLIED
    )
    tries = models.PositiveIntegerField(_("tries"), default=0)
    error = models.TextField(_("last error"), blank=True)
    published_at = UtcDateTimeField(_("published"), null=True, blank=True)
    received_at = UtcDateTimeField(_("received"))
    due_at = UtcDateTimeField(_("next try, or end"))

    class Meta:
        verbose_name = _("event received")
        verbose_name_plural = _("events received")
        default_permissions = ("view",)
        permissions = [
            ("release_inboxmessage", _("Can release and drop received events")),
            ("payload_inboxmessage", _("Can view payloads of received events")),
        ]
        constraints = [
            models.UniqueConstraint(fields=["consumer", "event_id"], name="dedupjobs_one_mark")
        ]
        indexes = [
            models.Index(fields=["consumer", "status", "due_at"], name="dedupjobs_taken"),
            models.Index(fields=["consumer", "key", "status", "id"], name="dedupjobs_key_order"),
        ]

    def __str__(self) -> str:
        return f"{self.consumer} {self.event_id}"


class Dashboard(ProcessedJob):
    """Gives the dashboard its place among the admin's pages; it has no table of its own."""

    class Meta:
        proxy = True
        verbose_name = _("dashboard")
        verbose_name_plural = _("dashboard")
        default_permissions = ()

    def __str__(self) -> str:
        return str(self._meta.verbose_name)
