"""
The same faults against plain RQ, the decorator that teams write, and dedupjobs.

    python -m benchmarks.faults        (make bench-faults)

    jobs       one job: it has one effect in the database, and takes a moment before and after
    script     what goes wrong when; the same for all
    __main__   every contestant on servers of its own, and the table
"""
