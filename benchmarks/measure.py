"""
Take one measurement in this fresh process: ``python -m benchmarks.measure drain "plain RQ" 40``.

The last line of output holds the figures as JSON.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

import django


def main(kind: str, *arguments: str) -> None:
    django.setup()
    print(json.dumps(import_module(f"benchmarks.{kind}").measure(*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
