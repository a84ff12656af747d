"""What must never run: a function that a forged message names, a pickle that does as it likes."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any


def spring(*args: Any, **kwargs: Any) -> None:
    """Leave a mark that this was called, whatever with."""
    (Path(os.environ["DEDUPJOBS_TEST_TRAP"]) / "called").touch()


class Bomb:
    """Leaves a mark of this name where it is unpickled."""

    def __init__(self, home: Path, name: str) -> None:
        self.mark = home / name

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def bomb(home: Path, name: str) -> bytes:
    return pickle.dumps(Bomb(home, name))


def call(function: str, args: Any, instance: Any = None, kwargs: Any = None) -> bytes:
    """Return a message's data as RQ's JSON serializer writes it, and as it does not."""
    return json.dumps([function, instance, args, {} if kwargs is None else kwargs]).encode()
