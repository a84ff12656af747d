"""
Real faults on real processes and servers, with a count of what was lost or done twice.

    python -m tests.faults --help        (make faults, make campaign)

    house      the servers of one stage, each behind a proxy: Valkey, and PostgreSQL or MariaDB
    ward       a stage's side of a nursery, one per host
    nursery    forks workers, coordinators and enqueuers from a process that has Django loaded
    arming     in those processes: dies, stops or is told to end where the stage has armed a probe
    app        the jobs, and their effects
    ledger     a file outside of the system under test: what was asked for, done, and struck
    enqueuer   calls jobs, and writes down which calls were committed
    stage      starts and restarts the actors, arms probes, looks at rows
    kinds      what goes wrong, one function each
    judge      the invariants of docs/design.md §7, asked after a quiet phase
    play       one stage from start to verdict, in a process of its own
    report     the table

    sentinels  another stage: fail-overs of a Redis that Sentinel watches (make sentinel)
    hosts      another one: cuts between hosts (make hosts), on a network of namespaces
"""
