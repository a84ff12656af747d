"""A web server on a port of its own that notes what is posted, and answers what it is told to."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.live import PATIENCE

Answer = tuple[int, dict[str, str]]  # status and headers


class Hook:
    """
    ``got``: headers and body of what was answered. ``answers``: in turn, the last one again.
    ``gate``: closed, it answers nothing.
    """

    def __init__(self, path: str, answer: Answer) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.answers = [answer]
        self.gate = threading.Event()
        self.gate.set()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.gate.wait(PATIENCE)
                hook.got.append(({n.lower(): v for n, v in self.headers.items()}, body))
                status, more = hook.answers.pop(0) if len(hook.answers) > 1 else hook.answers[0]
                try:
                    self.send_response(status)
                    for name, value in more.items():
                        self.send_header(name, value)
                    self.end_headers()
                except OSError:
                    pass  # the other side has gone

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/{path}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def told(self) -> list[Any]:
        """What the bodies say, as JSON."""
        return [json.loads(body) for _, body in self.got]

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
