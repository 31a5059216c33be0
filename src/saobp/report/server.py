"""Local server of the explorer: a page, and one endpoint that runs the model on a typed sentence.

There are two endpoints and no file access. It listens on 127.0.0.1 only. Another site could still use DNS
rebinding or cross-site posts: so Host and Origin headers must match this address, and a sentence must be
JSON, which no cross-site form can send. A fixed number of threads answers; requests and
responses have deadlines, so slow clients cannot block the threads.
"""

from __future__ import annotations

import json
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from saobp.report.page import explored, render

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")
BODY_BYTES, MOST_DIGITS = 65_536, 9
WORKERS = 8
WAITING = 256
"""Connections that may wait for a worker; more are answered with 503."""
DEADLINE = 15.0
"""Seconds for receiving a request, and for sending the response."""
BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\n\r\n"
    b'{"problem": "too many requests wait already: try again"}'
)

Answer = Callable[[str], dict[str, Any]]


def make_server(answer: Answer, *, subject: str, characters: int, tokens: int, port: int = 0) -> HTTPServer:
    """A server that is ready to ``serve_forever``; port 0 takes a free one.

    ``answer`` returns the explorer's data for a sentence, or raises ValueError with a message for the user;
    calls are serialised.
    """
    live = {"characters": characters, "tokens": tokens, "subject": subject}
    page = render([], title="Attention explorer", live=live).encode(errors="replace")
    turn = threading.Lock()

    def look(text: str) -> dict[str, Any]:
        if not text.strip():
            raise ValueError("the sentence is empty: type a few words")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError("the sentence holds half a character (a lone surrogate): type it again")
        if len(text) > characters:
            raise ValueError(f"the sentence has {len(text)} characters: at most {characters} are taken")
        with turn:
            return explored(answer(text), subject)

    handler = type("Handler", (_Handler,), {"page": page, "look": staticmethod(look)})
    try:
        return _Server((ADDRESS, port), handler)
    except OSError as problem:
        why = problem.strerror or problem
        raise OSError(f"port {port} cannot be opened ({why}): name another by --port, or none") from None


class _Server(HTTPServer):
    """A queue of connections and ``WORKERS`` threads; client disconnects are not errors."""

    request_queue_size = WAITING

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._waiting: queue.SimpleQueue[tuple[Any, Any] | None] = queue.SimpleQueue()
        super().__init__(address, handler)  # closes itself, which needs the queue, if the port is taken
        for _ in range(WORKERS):
            threading.Thread(target=self._work, daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._waiting.qsize() < WAITING:
            self._waiting.put((request, client_address))
            return
        with suppress(OSError):
            request.setblocking(False)
            request.sendall(BUSY)
        self.shutdown_request(request)

    def _work(self) -> None:
        while (connection := self._waiting.get()) is not None:
            try:
                self.finish_request(*connection)
            except Exception:
                self.handle_error(*connection)
            finally:
                self.shutdown_request(connection[0])

    def server_close(self) -> None:
        super().server_close()
        for _ in range(WORKERS):
            self._waiting.put(None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET / with the page and POST /attention with scores; rejects everything else."""

    page: bytes
    look: Answer
    timeout = DEADLINE
    server_version, sys_version = "saobp", ""

    def setup(self) -> None:
        super().setup()
        self.is_late = False
        self.deadline = self._shut_down_later(socket.SHUT_RD)

    def finish(self) -> None:
        self.deadline.cancel()
        super().finish()

    def _shut_down_later(self, direction: int) -> threading.Timer:
        """Shut down reads or writes of the connection at its deadline."""

        def shut_down() -> None:
            self.is_late = True
            with suppress(OSError):
                self.connection.shutdown(direction)

        timer = threading.Timer(DEADLINE, shut_down)
        timer.daemon = True
        timer.start()
        return timer

    def do_GET(self) -> None:
        if not self._is_from_here():
            return
        if self.path != "/":
            self._refuse(HTTPStatus.NOT_FOUND, "there is only the page itself, at /")
            return
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.page)

    def do_POST(self) -> None:
        if not self._is_from_here():
            return
        if self.path != "/attention":
            self._refuse(HTTPStatus.NOT_FOUND, "sentences go to /attention")
            return
        if self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a sentence comes as application/json")
            return
        length = self.headers.get("Content-Length", "")
        is_number = length.isascii() and length.isdigit() and len(length) <= MOST_DIGITS
        if not is_number or int(length) > BODY_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {BODY_BYTES} bytes are taken")
            return
        body = self.rfile.read(int(length))
        self.deadline.cancel()
        if self.is_late:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"a request must end within {DEADLINE:g} seconds")
            return
        try:
            text = json.loads(body)["text"]
            if not isinstance(text, str):
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            self._refuse(HTTPStatus.BAD_REQUEST, 'a sentence is sent as {"text": "..."}')
            return
        try:
            result = self.look(text)
        except ValueError as problem:
            self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, str(problem))
            return
        except Exception as problem:
            traceback.print_exc()
            name = type(problem).__name__
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"the model failed on this sentence ({name})")
            return
        self._send(HTTPStatus.OK, "application/json", json.dumps(result).encode())

    def _is_from_here(self) -> bool:
        """Whether Host and Origin match; sends the error response if not."""
        port = self.connection.getsockname()[1]
        hosts = {f"{name}:{port}" for name in NAMES}
        origin = self.headers.get("Origin")
        if self.headers.get("Host") in hosts and (origin is None or origin.removeprefix("http://") in hosts):
            return True
        self._refuse(HTTPStatus.FORBIDDEN, f"open http://{ADDRESS}:{port}/ in a browser on this machine")
        return False

    def _refuse(self, status: HTTPStatus, problem: str) -> None:
        self.close_connection = True
        self._send(status, "application/json", json.dumps({"problem": problem}).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.deadline.cancel()
        self.deadline = self._shut_down_later(socket.SHUT_RDWR)
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """No access log: typed sentences stay private."""
