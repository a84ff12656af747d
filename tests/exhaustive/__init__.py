"""
Every interleaving of one key with two workers, a coordinator and an operator, within bounds.

    state      what a world is made of: the key's rows, messages, workers, what the observer knows
    arrows     the arrows of docs/design.md §3 as pure functions of the rows
    actors     who takes which arrow when, and the faults
    observer   the invariants of §7, judged by the difference that a step made
    explorer   breadth first over all worlds, so that every trace is a shortest one
    twin       the same arrows and the real ``dedupjobs.lifecycle``, side by side

``python -m tests.exhaustive`` explores, compares, and drops the model's guards one by one.
"""
