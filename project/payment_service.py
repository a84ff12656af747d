"""
A payment service as unhelpful as they come: it charges as often as it is asked.

    POST /charges {"reference", "order", "amount"}   charge; 201 with the charge
    GET  /charges?reference=R                        what was charged under this reference
    GET  /charges                                    everything

A charge is written to the journal the moment it is received, *then* the service takes its
time, then it answers. So whoever dies while waiting has been charged, as in real life.
Being asked never charges and never hides a second charge: double charges stay visible.

    python -m project.payment_service --port 8001 --journal charges.jsonl --delay 0.3
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

MAX_BODY_BYTES = 16 * 1024


@dataclass(slots=True, kw_only=True)
class Charge:
    """Times are Unix seconds; ``answered_at`` stays None while the caller waits."""

    id: str
    reference: str
    order: str
    amount: str
    received_at: float
    answered_at: float | None = None


class Journal:
    """An append-only file of charges, read again at the start."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._charges: list[Charge] = []
        if path.exists():
            self._charges = [Charge(**json.loads(line)) for line in path.read_text().splitlines()]
        self._file = path.open("a", encoding="utf-8")

    def record(self, *, reference: str, order: str, amount: str) -> Charge:
        with self._lock:
            charge = Charge(
                id=f"ch_{len(self._charges) + 1:06d}",
                reference=reference,
                order=order,
                amount=amount,
                received_at=time.time(),
            )
            self._charges.append(charge)
            self._file.write(json.dumps(asdict(charge)) + "\n")
            self._file.flush()
        return charge

    def charges(self, reference: str | None = None) -> list[dict[str, Any]]:
        with self._lock:
            return [
                asdict(charge)
                for charge in self._charges
                if reference is None or charge.reference == reference
            ]


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the default of 5 drops connections in a burst

    def __init__(self, port: int, journal: Journal, delay_seconds: float) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.journal = journal
        self.delay_seconds = delay_seconds


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path != "/charges":
            self._answer(HTTPStatus.NOT_FOUND, {"error": "there is only /charges"})
            return
        asked = parse_qs(url.query, keep_blank_values=True)
        charges = self.server.journal.charges(asked.get("reference", [None])[0])
        self._answer(HTTPStatus.OK, {"charges": charges})

    def do_POST(self) -> None:
        try:
            body = self._body()
            wanted = {name: str(body[name]) for name in ("reference", "order", "amount")}
        except (ValueError, KeyError, TypeError):
            error = "send JSON with reference, order and amount"
            self._answer(HTTPStatus.BAD_REQUEST, {"error": error})
            return
        charge = self.server.journal.record(**wanted)
        time.sleep(self.server.delay_seconds)
        charge.answered_at = time.time()
        self._answer(HTTPStatus.CREATED, asdict(charge))

    def _body(self) -> Any:
        length = int(self.headers.get("Content-Length", "0"))
        if not 0 < length <= MAX_BODY_BYTES:
            raise ValueError("no body, or too large a one")
        return json.loads(self.rfile.read(length))

    def _answer(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:
            self.log_message("the caller is gone; the charge stays")


def main() -> None:
    parser = argparse.ArgumentParser(description="A payment service without idempotency.")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--journal", type=Path, default=Path("charges.jsonl"))
    parser.add_argument("--delay", type=float, default=0.3, help="seconds before an answer")
    options = parser.parse_args()
    server = Server(options.port, Journal(options.journal), options.delay)
    print(f"payment service on http://127.0.0.1:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
