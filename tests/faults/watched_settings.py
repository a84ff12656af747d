"""Settings of a stage whose Redis is watched by sentinels: those that docs/deployment.md shows."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from tests.faults.settings import *  # noqa: F403
from tests.faults.settings import RQ_QUEUES as QUEUES

PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"


def _shown(sentinels: list[int]) -> dict[str, Any]:
    """Return the settings of the page's section, with these ports of sentinels."""
    section = PAGE.read_text().split("\n## Sentinel\n")[1]
    (code,) = re.findall(r"```python\n# settings.py\n(.*?)```", section.split("\n## ")[0], re.S)
    for number, port in enumerate(sentinels, 1):
        code = code.replace(f'"sentinel-{number}.example", 26379', f'"127.0.0.1", {port}')
    assert ".example" not in code
    names: dict[str, Any] = {}
    exec(code, names)
    return names


_given = _shown(json.loads(os.environ["FAULTS_SENTINELS"]))
RQ_QUEUES = dict.fromkeys(QUEUES, _given["RQ_QUEUES"]["default"])
DJANGO_REDIS_CONNECTION_FACTORY = _given["DJANGO_REDIS_CONNECTION_FACTORY"]
CACHES = _given["CACHES"]
