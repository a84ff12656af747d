"""
Small wrongs in the protocol, as textual replacements that fail loudly once the code has moved.

Each drops one guard or swaps one order of docs/design.md §3, and each must be caught by the
simulation within SEEDS seeds, or by the test that it names. A test is named where one guard
stands behind another: with one writer at a time no interleaving reaches it alone.

The simulation runs without the status cache, whose wrongs name a test.
"""

from __future__ import annotations

from dataclasses import dataclass

SEEDS = 3_000

Change = tuple[str, str, str]  # file below dedupjobs/, what stands there once, what shall


@dataclass(frozen=True, slots=True)
class Mutant:
    """``test``: the one that must fail, as pytest selects it; empty: the simulation must."""

    name: str
    changes: tuple[Change, ...]
    test: str = ""


CALLS, CLAIMS = "lifecycle/calls.py", "lifecycle/claims.py"
LEAVING, LOSSES = "lifecycle/leaving.py", "lifecycle/losses.py"
NEWEST = '{"pk": self.claim.job_pk, "attempts": self.claim.number}'
RUNNING = '{**newest, "status": Status.RUNNING, **self.guards}'
OPERATORS, SETTLING = "lifecycle/operators.py", "lifecycle/settling.py"
STEPPING = "lifecycle/stepping.py"

ALL = [
    # ---- the status cache
    Mutant(
        "a cached success answers after its window",
        (
            (
                "cache.py",
                "ttl = conf.get().L2_TTL if left is None else "
                "min(conf.get().L2_TTL, left - conf.get().L1_TTL)",
                "ttl = conf.get().L2_TTL",
            ),
        ),
        test="test_cache.py::test_success_answers_no_longer_than_its_window",
    ),
    Mutant(
        "a reader fills an entry whose lease a change has broken",
        (("cache.py", "if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end\n", ""),),
        test="test_cache.py::test_slow_reader_does_not_put_an_old_row_over_a_newer_one",
    ),
    Mutant(
        "an older entry of Redis is believed after a newer state was seen",
        (
            (
                "cache.py",
                "return entry is not None and entry.known.stamp > known.stamp",
                "return False",
            ),
        ),
        test="test_cache.py::test_older_entry_of_redis_is_not_believed_by_who_has_seen_newer",
    ),
    Mutant(
        "an entry is believed whoever wrote it",
        (("seal.py", "return any(", "return True or any("),),
        test="test_cache.py::test_entry_that_we_did_not_write_is_no_answer",
    ),
    Mutant(
        "a change is not announced",
        (("herald.py", "    invalidation.announce(changes)\n", "    pass\n"),),
        test="test_invalidation.py::test_each_change_of_a_key_is_told_once_after_it_was_committed",
    ),
    # ---- enqueue, replace, rerun, reopen
    Mutant(
        "the unique constraint is gone",
        (
            (
                "models.py",
                'models.UniqueConstraint(fields=["key_hash"], name="dedupjobs_one_per_key")',
                "",
            ),
        ),
    ),
    Mutant(
        "an insert that lost the race is answered as CREATED",
        (
            (
                CALLS,
                "for row in mine if row.dispatch_id == drawn[row.key_hash]}",
                "for row in mine}",
            ),
        ),
    ),
    Mutant(
        "reopened from a version that has moved on",
        (
            (
                CALLS,
                ".filter(pk=row.pk, status=row.status, version=row.version)",
                ".filter(pk=row.pk)",
            ),
        ),
    ),
    Mutant(
        "reopened while its success holds the key",
        ((CALLS, "and holds and not over:", "and holds and over:"),),
    ),
    Mutant(
        "a dead key under on_dead=block is reopened",
        ((CALLS, '(row.status == Status.DEAD and options.on_dead == "block")', "False"),),
    ),
    Mutant(
        "the generation grows when a DEAD key is called again",
        ((CALLS, 'generation=F("generation") + int(grows)', 'generation=F("generation") + 1'),),
    ),
    Mutant(
        "other work goes on in the generation of a DEAD key",
        ((CALLS, "or (other and row.attempts > 0)", "or (other and False)"),),
    ),
    Mutant(
        "reopened with the used budgets",
        ((CALLS, "            **FRESH,\n            **_payload", "            **_payload"),),
    ),
    Mutant(
        "replaced after an attempt",
        (
            (
                CALLS,
                "if row.status == Status.PENDING and not row.tried:",
                "if row.status == Status.PENDING:",
            ),
        ),
    ),
    Mutant(
        "replaced although a claim came in between",
        (
            (
                CALLS,
                "jobs().filter(pk=row.pk, status=Status.PENDING, version=row.version)",
                "jobs().filter(pk=row.pk)",
            ),
        ),
    ),
    Mutant(
        "a rerun is noted on a row that has just ended",
        (
            (
                CALLS,
                "pk=row.pk, status__in=ACTIVE, generation=row.generation, cancel_requested=False",
                "pk=row.pk",
            ),
        ),
    ),
    Mutant(
        "published before the commit",
        (
            (
                "dispatch.py",
                "transaction.on_commit(push_deliveries, using=lifecycle.alias(), robust=True)",
                "push_deliveries()",
            ),
        ),
    ),
    Mutant(
        "a rerun is accepted although the stop will drop it",
        (
            (CALLS, "    if row.cancel_requested:  # the stop", "    if False:  # the stop"),
            (
                CALLS,
                "generation=row.generation, cancel_requested=False",
                "generation=row.generation",
            ),
        ),
    ),
    Mutant(
        "a success answers after its window",
        ((CALLS, "and holds and not over:", "and holds:"),),
    ),
    # ---- claim
    Mutant(
        "claimed from RUNNING",
        (
            (
                CLAIMS,
                '        "status__in": WAITING,\n',
                '        "status__in": (*WAITING, "RUNNING"),\n',
            ),
        ),
    ),
    Mutant(
        "claimed before run_after",
        ((CLAIMS, '        "run_after__lte": DbNow(),\n', ""),),
    ),
    Mutant(
        "claimed by a message of an older generation",
        (
            (
                CLAIMS,
                '        "generation": generation,\n        "run',
                '        "run',
            ),
        ),
    ),
    Mutant(
        "arguments are read before the claim",
        (
            (
                CLAIMS,
                '    probes.reach("claim.before")\n',
                '    early = jobs().filter(pk=pk).first()\n    probes.reach("claim.before")\n',
            ),
            (CLAIMS, "    job,\n", "    job,\n    jobs,\n"),
            (
                CLAIMS,
                "    row, attempt = won\n",
                "    row, attempt = won\n    row.args = early.args\n",
            ),
        ),
    ),
    Mutant(
        "the lease comes from the worker's clock",
        (
            (
                CLAIMS,
                '"lease_until": DbNow(lease), "queue',
                '"lease_until": clock.utcnow() + timedelta(0, lease), "queue',
            ),
            (
                CLAIMS,
                "from datetime import datetime\n",
                "from datetime import datetime, timedelta\n",
            ),
            (
                CLAIMS,
                "from dedupjobs import probes, registry",
                "from dedupjobs import clock, probes, registry",
            ),
        ),
    ),
    Mutant(
        "a claim without a reply is not looked up",
        (
            (
                "runner.py",
                "if not first and (found := lifecycle.claimed_by(owner)):",
                "if False and (found := lifecycle.claimed_by(owner)):",
            ),
        ),
    ),
    Mutant(
        "claimed although a request waits",
        ((CLAIMS, "        **UNASKED,\n", ""),),
        test="test_lifecycle.py::test_claim_while_a_request_waits_takes_nothing",
    ),
    Mutant(
        "a beat revives what has ended",
        (
            (
                CLAIMS,
                "attempts().filter(pk=fence, outcome=None).update(**changes)",
                "attempts().filter(pk=fence).update(**changes)",
            ),
            (
                CLAIMS,
                "skip_locked(attempts().filter(pk=fence, outcome=None)).values_list",
                "skip_locked(attempts().filter(pk=fence)).values_list",
            ),
        ),
    ),
    # ---- endings
    Mutant(
        "an ending moves a job that is not RUNNING by its attempt",
        (
            (
                SETTLING,
                'return {"pk": fence, "outcome": None}',
                'return {"pk": fence}',
            ),
            (LEAVING, NEWEST, '{"pk": self.claim.job_pk}'),
            (LEAVING, RUNNING, "{**newest, **self.guards}"),
        ),
    ),
    Mutant(
        "an ending does not ask whether its attempt is open",
        (
            (
                SETTLING,
                'return {"pk": fence, "outcome": None}',
                'return {"pk": fence}',
            ),
        ),
        test="test_lifecycle.py::test_ending_of_an_attempt_that_has_ended_writes_nothing",
    ),
    Mutant(
        "an ending does not ask whether its job is RUNNING",
        (
            (
                LEAVING,
                RUNNING,
                "{**newest, **self.guards}",
            ),
        ),
        test="test_lifecycle.py::test_ending_of_a_job_that_does_not_run_writes_nothing",
    ),
    Mutant(
        "an ending does not ask whether its attempt is the newest",
        (
            (
                LEAVING,
                NEWEST,
                '{"pk": self.claim.job_pk}',
            ),
        ),
        test="test_lifecycle.py::test_ending_of_a_job_that_has_a_newer_attempt_writes_nothing",
    ),
    Mutant(
        "a success forgets the waiting rerun",
        (
            (
                SETTLING,
                'guards={"rerun_args": None})',
                "guards={})",
            ),
        ),
    ),
    Mutant(
        "giving up forgets the waiting rerun",
        (
            (
                LEAVING,
                'if on_dead == "block":\n        return leave(claim',
                "if on_dead:\n        return leave(claim",
            ),
        ),
    ),
    Mutant(
        "a taken up rerun runs in the old generation",
        ((LEAVING, '        "generation": NEXT_GENERATION,\n', ""),),
    ),
    Mutant(
        "a taken up rerun has the used budgets",
        (
            (
                LEAVING,
                "        **UNSENT,\n        **FRESH,\n    }\n\n\ndef die",
                "        **UNSENT,\n    }\n\n\ndef die",
            ),
        ),
    ),
    Mutant(
        "a failure is not counted",
        ((SETTLING, 'return {"failures": NEXT_FAILURE, "error"', 'return {"error"'),),
    ),
    Mutant(
        "a failure ignores a waiting request",
        (
            (
                SETTLING,
                "leave(claim, Status.RETRYING, **UNASKED, sets=sets) or obey(claim, counted)",
                "leave(claim, Status.RETRYING, sets=sets)",
            ),
        ),
    ),
    Mutant(
        "an interruption ignores on_lost=hold",
        ((SETTLING, 'if on_lost == "hold" and claim.began:', "if False:"),),
    ),
    Mutant(
        "an ending without a reply is settled again unread",
        (
            (
                "runner.py",
                "outcome = None if first and not tried else lifecycle.outcome_of(claim.fence)",
                "outcome = None",
            ),
        ),
    ),
    Mutant(
        "an atomic job's COMMIT without a reply counts as done",
        (
            (
                "runner.py",
                "    if outcome == AttemptOutcome.SUCCEEDED:\n"
                '        return Succeeded(result="null"), lifecycle.NO_NOTE, True\n',
                "    if isinstance(error, CONNECTION_ERRORS):\n"
                '        return Succeeded(result="null"), lifecycle.NO_NOTE, True\n',
            ),
        ),
    ),
    Mutant(
        "complete() is repeated without its effect",
        (
            (
                "runner.py",
                "if isinstance(ending, Succeeded) or _is_of_connection(ending):",
                "if False:",
            ),
        ),
    ),
    Mutant(
        "effect and success in two transactions",
        (
            (
                "runner.py",
                "            if isinstance(ending, Succeeded):\n"
                "                lifecycle.assert_unbroken(mark)\n"
                "                status = settle(claim, ending, note, job)\n"
                "            if status is None:\n"
                "                raise _UndoError\n"
                "        return ending, status\n",
                "            if not isinstance(ending, Succeeded):\n"
                "                raise _UndoError\n"
                "        return ending, settle(claim, ending, note, job)\n",
            ),
        ),
    ),
    Mutant(
        "fenced writes without the fence",
        (
            ("context.py", "if not lifecycle.lock_open(self.fence):", "if False:"),
            (
                "context.py",
                "if not self.completed and not lifecycle.renew(self.fence, lease=lease):",
                "if False:",
            ),
        ),
    ),
    # ---- reclaim
    Mutant(
        "reclaim trusts its earlier look at the lease",
        (
            (
                LOSSES,
                'expired: dict[str, Any] = {"beat_at": beat_at, "lease_until__lt": DbNow()}',
                "expired: dict[str, Any] = {}",
            ),
        ),
    ),
    Mutant(
        "reclaim takes an attempt that has ended",
        (
            (
                LOSSES,
                '.filter(pk=Slot("pk", JobAttempt._meta.pk), outcome=None)',
                '.filter(pk=Slot("pk", JobAttempt._meta.pk))',
            ),
            (LOSSES, '{"pk": fence, "outcome": None, **expired}', '{"pk": fence, **expired}'),
        ),
    ),
    Mutant(
        "one witness is enough",
        (
            (
                "coordinator.py",
                "self.overdue > 0 and self.still >= self.lease / 3",
                "self.overdue > 0",
            ),
        ),
    ),
    Mutant(
        "a clock set back keeps the dead",
        (("coordinator.py", "self.overdue < -self.lease and self.still >= self.lease", "False"),),
    ),
    Mutant(
        "a loss is not counted",
        ((LOSSES, '        counted["lost_count"] = F("lost_count") + 1', "        pass"),),
    ),
    Mutant(
        "a loss ignores max_lost",
        ((LOSSES, "job.lost_count + 1 >= options.max_lost", "False"),),
    ),
    Mutant(
        "a loss ignores on_lost=hold",
        ((LOSSES, 'if begun and options.on_lost == "hold":', "if False:"),),
    ),
    Mutant(
        "a loss ignores a waiting cancel",
        ((LOSSES, "    if job.cancel_requested:", "    if False:"),),
    ),
    # ---- messages
    Mutant(
        "EXISTS proves a queued message",
        (
            (
                "coordinator.py",
                "                if row.dispatch_id not in in_hands\n",
                "                if not dispatch._producer(queue).client.exists(\n"
                '                    f"rq:job:{row.dispatch_id}"\n'
                "                )\n",
            ),
        ),
    ),
    Mutant(
        "lost messages are not sent again",
        (("coordinator.py", "+ (self.resend_lost(queue) if sweep else 0)", "+ 0"),),
    ),
    Mutant(
        "a sweep goes on where the last one stopped",
        (
            (
                "coordinator.py",
                "    last, full = 0, True\n    while full:\n",
                "    last, full = globals().setdefault('_last', 0), True\n    while full:\n",
            ),
            (
                "coordinator.py",
                "        last = rows[-1][1] if rows else last\n",
                "        last = globals()['_last'] = rows[-1][1] if rows else last\n",
            ),
        ),
    ),
    # ---- retention
    Mutant(
        "a row that holds its key is pruned",
        (
            (
                "lifecycle/retention.py",
                "holds = ExpressionWrapper(held(name), BooleanField())",
                "holds = ExpressionWrapper(Q(pk=0), BooleanField())",
            ),
        ),
    ),
    Mutant(
        "a tombstone's arguments are compared",
        (("keys.py", "    if not stored:\n        return ()\n", ""),),
    ),
    Mutant(
        "run_now asks for a row that was pruned",
        (("inline.py", "filter(pk=row.pk).first() or row)", "get(pk=row.pk))"),),
        test="test_run_now.py::"
        "test_call_whose_row_was_pruned_before_its_run_ended_gets_the_row_as_it_was",
    ),
    Mutant(
        "prune drops a waiting rerun",
        (("lifecycle/retention.py", "ended.filter(rerun_args=None)", "ended"),),
        test="test_retention.py::"
        "test_dead_row_that_keeps_a_rerun_for_a_person_stays_until_he_takes_it_up",
    ),
    # ---- lock and operators
    Mutant(
        "the lock is released without its token",
        (
            (
                "locks.py",
                "return _own(pk, Lock.LUA_RELEASE_SCRIPT, words, waited=waited, cargo=cargo)",
                "return Grip.HELD if _client().delete(name_of(pk)) else Grip.BUSY",
            ),
        ),
    ),
    Mutant(
        "an operator's retry ignores the version",
        (
            (
                OPERATORS,
                "_put_back(_seen([pk], version).filter(status__in=RETRIED))",
                "_put_back(jobs().filter(pk=pk, status__in=RETRIED))",
            ),
        ),
    ),
    Mutant(
        "an operator's cancel ignores the version",
        (
            (
                OPERATORS,
                "    seen = _seen([pk], version)\n    for rerun",
                "    seen = jobs().filter(pk=pk)\n    for rerun",
            ),
        ),
    ),
    Mutant(
        "an operator's retry grows the generation",
        (
            (
                OPERATORS,
                "        status=Status.PENDING,\n        run_after=DbNow(),\n",
                "        status=Status.PENDING,\n        run_after=DbNow(),\n"
                '        generation=F("generation") + 1,\n',
            ),
        ),
    ),
    Mutant(
        "an operator's retry takes a tombstone",
        (
            (OPERATORS, 'seen.exclude(args="").exclude(', "seen.exclude("),
            (OPERATORS, 'seen.exclude(args="").filter(', "seen.filter("),
        ),
        test="test_operations.py::test_retry_of_a_job_without_its_arguments_is_refused",
    ),
    Mutant(
        "an operator's retry forgets the waiting rerun",
        ((OPERATORS, '.exclude(args="").filter(rerun_args=None),', '.exclude(args=""),'),),
    ),
    # ---- steps
    Mutant(
        "a stale attempt writes a step",
        ((STEPPING, " AND COALESCE(outcome, '') = '' {lock}", " {lock}"),),
        test="test_steps.py::test_stale_attempt_begins_no_step",
    ),
    Mutant(
        "a stale attempt commits what its atomic step wrote",
        (
            (
                "steps.py",
                "if not lifecycle.enter_step(self._claim, entry, known=self._knows(step)):",
                "if lifecycle.enter_step(self._claim, entry, known=self._knows(step)) and False:",
            ),
        ),
    ),
    Mutant(
        "a stale attempt does not hear that its record was refused",
        (
            (
                "steps.py",
                "if not persist(look_or_write, patience=patience, claim=self._claim):",
                "if persist(look_or_write, patience=patience, claim=self._claim) and False:",
            ),
        ),
        test="test_steps.py::test_stale_attempt_records_no_result_and_the_step_stays_in_doubt",
    ),
    Mutant(
        "the success of a step is taken over",
        ((STEPPING, "    AND state <> 'SUCCEEDED' AND EXISTS", "    AND EXISTS"),),
        test="test_steps.py::test_success_of_a_step_stands_whatever_is_written_after_it",
    ),
    Mutant(
        "the success of a step is ended again",
        ((STEPPING, "    AND state = 'STARTED' AND EXISTS", "    AND EXISTS"),),
        test="test_steps.py::test_success_of_a_step_stands_whatever_is_written_after_it",
    ),
    Mutant(
        "a step in doubt is repeated",
        (("steps.py", "if in_doubt and not step.repeat:", "if False:"),),
        test="test_steps.py::test_step_in_doubt_holds_the_job_and_says_which_and_how_to_go_on",
    ),
    Mutant(
        "a step is recorded as done when it begins",
        (
            (
                "steps.py",
                "        self._enter(step, StepState.STARTED)\n",
                "        self._enter(step, StepState.SUCCEEDED, result='null')\n",
            ),
        ),
        test="test_steps.py::test_step_that_raises_has_ended_and_is_run_again",
    ),
    Mutant(
        "a step's record shares a transaction that its effect does not",
        (("steps.py", "if not step.atomic and self._is_in_transaction():", "if False:"),),
        test="test_steps.py::test_step_that_is_not_atomic_is_refused_in_an_atomic_job",
    ),
    Mutant(
        "steps of another generation answer",
        (
            (
                STEPPING,
                "steps().filter(job_id=claim.job_pk, generation=claim.generation))",
                "steps().filter(job_id=claim.job_pk))",
            ),
        ),
    ),
    Mutant(
        "an older token writes",
        (("fences.py", "rows.filter(fence__lte=token).update", "rows.update"),),
        test="test_fences.py::test_older_token_is_refused_and_writes_nothing",
    ),
    # ---- live controls
    Mutant(
        "a limit is never reached",
        (("controls.py", "return (self.most or 0) - int(self._open().count())", "return 1"),),
        test="test_controls.py::test_job_has_no_more_open_attempts_than_its_limit",
    ),
    Mutant(
        "a row that found no room does not look again",
        (("asides.py", "and controls.refusal_of(row) is None", "and False"),),
        test="test_controls.py::test_room_that_is_freed_while_a_row_is_set_aside_is_not_missed",
    ),
    Mutant(
        "a row is set aside although it was handed over again meanwhile",
        (
            (
                "lifecycle/sending.py",
                "generation=generation, status__in=WAITING, dispatch_id=sent_as)",
                "generation=generation, status__in=WAITING)",
            ),
        ),
        test="test_controls.py::test_row_that_is_handed_over_meanwhile_is_not_set_aside",
    ),
    Mutant(
        "an ending wakes nobody",
        (("runner.py", "    _let_next_in(claim)\n", ""),),
        test="test_controls.py::test_run_that_ends_wakes_the_next_row_of_its_group",
    ),
    Mutant(
        "a sweep comes to the first groups only",
        (
            (
                "asides.py",
                "self._after = marks[-1] if len(marks) == MOST_MARKS else lifecycle.ROOM_MARKS",
                "self._after = lifecycle.ROOM_MARKS",
            ),
        ),
        test="test_controls.py::test_sweep_comes_to_every_group_however_many_wait",
    ),
    # ---- locks on several servers, on none, and not to be had
    Mutant(
        "half of the lock servers are a majority",
        (
            ("votes.py", "return servers // 2 + 1", "return (servers + 1) // 2 or 1"),
            ("votes.py", "if granted >= needed:", "if granted >= needed - 1:"),
        ),
        test="test_votes.py::test_verdict_of_all_servers_is_that_of_the_rule",
    ),
    Mutant(
        "a lock that was granted too late is held",
        (("votes.py", "return ttl - elapsed - drift(ttl)", "return ttl"),),
        test="test_quorum.py::test_lock_granted_later_than_it_lives_is_not_held_and_given_back",
    ),
    Mutant(
        "what a minority of lock servers has granted stays there",
        (
            (
                "locks.py",
                "    if held and (quorum := _quorum()) is not None:\n        commands",
                "    if not held and (quorum := _quorum()) is not None:\n        commands",
            ),
        ),
        test="test_quorum.py::test_lock_that_others_hold_on_a_majority_is_busy_and_our_own_part_is_"
        "given_back",
    ),
    Mutant(
        "a slow lock server's answer is taken for that to the next question",
        (
            (
                "quorum.py",
                "            self._owed.append([self._sent, left])\n",
                "            pass\n",
            ),
        ),
        test="test_quorum.py::test_late_answer_is_not_taken_for_that_to_the_next_question",
    ),
    Mutant(
        "a stopped lock server is waited for each time",
        (
            (
                "quorum.py",
                "        self.trouble, self._again = error, clock.monotonic() + AGAIN\n",
                "        pass\n",
            ),
        ),
        test="test_quorum.py::test_majority_that_is_stopped_costs_one_timeout_and_then_nothing",
    ),
    Mutant(
        "a forked child asks lock servers by its parent's connections",
        (("quorum.py", "        if self._pid != os.getpid():\n            self._renew()\n", ""),),
        test="test_quorum.py::test_forked_child_has_connections_of_its_own",
    ),
    Mutant(
        "a job that waits for a lock runs without one",
        (("runner.py", "owner, place, locks=not unreachable)", "owner, place, locks=True)"),),
        test="test_on_redis_error.py::test_job_that_waits_is_set_aside_and_runs_once_locks_can_be_"
        "had_again",
    ),
    Mutant(
        "a message goes round while no lock can be had",
        (("asides.py", "return refusal.mark != lifecycle.NO_LOCKS and ", "return "),),
        test="test_on_redis_error.py::test_job_that_waits_is_set_aside_and_runs_once_locks_can_be_"
        "had_again",
    ),
    Mutant(
        "a batch of jobs that wait for locks runs without",
        (("batches/members.py", "        and not (without and job.options.needs_lock)\n", ""),),
        test="test_on_redis_error.py::test_batch_is_set_aside_as_a_whole",
    ),
    Mutant(
        "a call is accepted although its job refuses it without a lock",
        (("client.py", "return locks.why_unreachable() if asks else", 'return "" if asks else'),),
        test="test_on_redis_error.py::test_call_is_refused_in_words_and_makes_no_row",
    ),
    Mutant(
        "a lock that was taken in vain stays",
        (
            ("runner.py", "    if not options.takes_lock:\n", "    if False:\n"),
            (
                "batches/members.py",
                "    locks.release_many([(c.job_pk, c.owner) for c in free",
                "    locks.release_many([(c.job_pk, c.owner) for c in free[:0]",
            ),
        ),
        test="test_optimistic.py::test_message_that_describes_itself_otherwise_runs_once_and_leaves_"
        "no_lock",
    ),
    Mutant(
        "beats renew a lock that nobody has taken",
        (("heartbeat.py", "        if not self.has_lock:\n            return\n", ""),),
        test="test_optimistic.py::test_worker_and_its_parent_ask_nothing_about_the_lock_of_a_long_"
        "run",
    ),
]
