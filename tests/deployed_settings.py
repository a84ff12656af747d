"""Settings of a process that runs as docs/deployment.md says; the test names what is different."""

from __future__ import annotations

import json
import os

from tests.settings import *  # noqa: F403

for _name, _value in json.loads(os.environ["DEDUPJOBS_TEST_DEPLOYED"]).items():
    globals()[_name] = globals()[_name] | _value if isinstance(_value, dict) else _value
