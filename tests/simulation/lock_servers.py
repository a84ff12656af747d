"""
Three lock servers in the one model of Redis: a database each, so each question to each of them is
an exchange of its own, which may be lost or be its asker's last.

Stands for ``dedupjobs.quorum``, whose sockets the world does not have; what is made of the answers
(``ballot``, ``votes``, ``locks``) runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redis import Redis
from redis.exceptions import RedisError

from dedupjobs.quorum import Answer, Commands

ALIASES = ("locks0", "locks1", "locks2")
FIRST = 2  # Redis database of the first one


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    client: Redis


class SimulatedQuorum:
    def __init__(
        self, names: Sequence[str], client_of: Callable[[str], Redis], *, timeout: float
    ) -> None:
        self.servers = [Server(name, client_of(name)) for name in names]

    def ask(
        self,
        commands: Commands,
        *,
        enough: Callable[[list[Answer]], bool],
        extra: Commands | None = None,
    ) -> list[Answer]:
        """Ask one after the other; all are asked, whoever has decided."""
        answers: list[Answer] = []
        for server in self.servers:
            pipe = server.client.pipeline(transaction=False)
            commands(pipe)
            if extra is not None and not answers:
                extra(pipe)
            try:
                answers.append(pipe.execute(raise_on_error=False))
            except RedisError as error:
                answers.append(error)
        return answers

    def close(self) -> None:
        """There is nothing to close."""
