"""
The demo: a recorded stream of payment webhooks against real processes that get killed.

    python -m project.demo        (make demo)

    plan      the numbers, each with its reason
    stack     the processes: Valkey, payment service, web server, two workers
    family    which process is whose child
    replay    the payment provider and the shoppers, over real HTTP
    faults    kill -9 and a Redis wipe, timed by the payment service's own record
    story     who does what when, and the live line
    report    what came of it: the table and the JSON line
"""
