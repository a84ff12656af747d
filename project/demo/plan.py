"""
The numbers of the demo. It has to end within a minute on two cores.
"""

from __future__ import annotations

# Short, so that a whole worker's death is seen and healed while you watch. The bound for it
# is 4/3 lease + RECLAIM_EVERY + LEADER_TTL: 22 s.
LEASE_SECONDS = 5

# Long enough to be found waiting and be killed in time, short enough that 130 charges by two
# workers take 13 s.
SERVICE_DELAY_SECONDS = 0.2

WORKERS = 2

# As many as let the recorded bursts (up to six at one instant) really run at once, and the
# shoppers beside them.
CLIENTS = 12
SHOPPERS = 6

# Seconds after the stream's start. The worker dies first: its recovery takes longest. All
# of it falls where the two workers are behind, so that jobs are waiting when Redis is wiped.
KILL_WORKER_AT = 4.0
KILL_LEDGER_AT = 6.0
KILL_HORSE_AT = 8.0
WIPE_REDIS_AT = 12.0

# Redis is wiped as soon as this many jobs wait, so that the wipe really loses messages.
WAITING_AT_WIPE = 5
FAULT_WITHIN_SECONDS = 15.0

# Providers and people try again when they get no answer or a 5xx. Long enough for the web
# server to come back, should you kill it.
SEND_TRIES = 10
SEND_AGAIN_AFTER_SECONDS = 0.5

# What you kill by hand is started again, but not what can not live: one process with so many
# lives, each shorter than you would find the time to kill it in.
SHORT_LIFE_SECONDS = 3.0
SHORT_LIVES = 4
SUPERVISE_EVERY_SECONDS = 0.5

# Everything has to be at rest this long after the last delivery, or it counts as lost.
SETTLE_WITHIN_SECONDS = 60.0

START_WITHIN_SECONDS = 120.0
# A worker ends its current job first; that takes less than a second here.
STOP_WITHIN_SECONDS = 15.0
