"""The explorer's server: what it answers, and everything that it must not."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from typer.testing import CliRunner

import saobp.report.server
from saobp.cli import app
from saobp.metrics.diagnosis.loading import example_model
from saobp.report.explorer import decode_head, explorer_data, is_explorer
from saobp.report.server import BODY_BYTES, WORKERS, make_server
from saobp.testing.tiny_models import tiny_model

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    model, tokenizer = tiny_model("bert"), example_model()[1]
    server = make_server(
        lambda text: explorer_data(model, tokenizer, [text], max_tokens=16),
        subject="tiny",
        characters=100,
        tokens=16,
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def ask(
    port: int, method: str, path: str, body: str | bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def sentence(port: int, text: Any, **headers: str) -> tuple[int, Any]:
    status, _, body = ask(
        port, "POST", "/attention", json.dumps({"text": text}), Content_Type="application/json", **headers
    )
    return status, json.loads(body)


def test_the_page_and_a_sentence(port: int) -> None:
    status, headers, body = ask(port, "GET", "/")
    assert status == 200
    assert b"connect-src &#39;self&#39;" in body
    assert headers["X-Content-Type-Options"] == "nosniff"
    status, found = sentence(port, "one two three")
    assert status == 200
    assert is_explorer(found)
    assert found["sentences"][0]["tokens"] == ["one", "two", "three"]
    assert decode_head(found["sentences"][0]["scores"][0][0], 3).shape == (3, 3)


@pytest.mark.parametrize(
    "path", ["/../etc/passwd", "//etc/passwd", "/%2e%2e/", "/attention", "/page.py", "/?x", ""]
)
def test_no_file_can_be_reached(port: int, path: str) -> None:
    status, _, body = ask(port, "GET", path or "*")
    assert status == 404
    assert json.loads(body) == {"problem": "there is only the page itself, at /"}


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil:{port}", ""]
)
def test_another_name_for_this_machine_is_refused(port: int, host: str) -> None:
    assert ask(port, "GET", "/", Host=host.format(port=port))[0] == 403
    assert sentence(port, "one two", Host=host.format(port=port))[0] == 403


def test_only_this_page_may_ask(port: int) -> None:
    assert sentence(port, "one two", Origin="http://evil.example")[0] == 403
    assert sentence(port, "one two", Origin="null")[0] == 403
    assert sentence(port, "one two", Origin=f"http://127.0.0.1:{port}")[0] == 200
    assert sentence(port, "one two", Host=f"localhost:{port}")[0] == 200
    body = json.dumps({"text": "one two"})
    assert ask(port, "POST", "/attention", body, Content_Type="text/plain")[0] == 415
    assert ask(port, "POST", "/elsewhere", body, Content_Type="application/json")[0] == 404
    assert ask(port, "PUT", "/attention", body, Content_Type="application/json")[0] == 501


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("x" * 101, "at most 100"),
        ("one \ud800 two", "half a character"),
        ("one", "no sentence of at least two tokens"),
        (7, 'sent as {"text": "..."}'),
        (None, 'sent as {"text": "..."}'),
    ],
)
def test_bad_sentences_get_a_sentence(port: int, text: Any, said: str) -> None:
    status, found = sentence(port, text)
    assert status in (400, 422)
    assert said in found["problem"]


def test_a_model_that_fails_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(text: str) -> dict[str, Any]:
        raise RuntimeError(f"no memory for {text}")

    server = make_server(fail, subject="broken", characters=100, tokens=16)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    status, found = sentence(server.server_address[1], "one two")
    assert (status, found["problem"]) == (500, "the model failed on this sentence (RuntimeError)")
    server.server_close()
    thread.join()
    assert "no memory for one two" in capsys.readouterr().err


def test_bodies_are_bounded_and_checked(port: int) -> None:
    for body in (b"{", b"[]", b'"text"', b"\xff", b"[" * 5000):
        assert ask(port, "POST", "/attention", body, Content_Type="application/json")[0] == 400
    status, _, _ = ask(
        port, "POST", "/attention", b"", Content_Length="99999999", Content_Type="application/json"
    )
    assert status == 413
    assert ask(port, "POST", "/attention", b"x" * (BODY_BYTES + 1), Content_Type="application/json")[0] == 413
    for length in ("-1", "abc", "١٢"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            request = (
                f"POST /attention HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            )
            connection.sendall(f"{request}Content-Length: {length}\r\n\r\n".encode())
            assert b" 413 " in connection.recv(64)


def test_it_listens_on_this_machine_only(port: int) -> None:
    """Every 127.x.x.x leads to this machine, and a server on all of its addresses would answer at each."""
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=2):
        pass


def test_the_command_refuses_in_a_sentence() -> None:
    for arguments, said in (
        ([], "name a model"),
        (["./nowhere"], "there is no model folder"),
        (["--example", "--refinement", "high:x"], "strength"),
    ):
        shown = CliRunner().invoke(app, ["explore", *arguments, "--no-browser"])
        assert shown.exit_code == 1
        assert said in shown.output
        assert "Traceback" not in shown.output


def test_a_port_in_use_is_named_in_a_sentence(port: int) -> None:
    shown = CliRunner().invoke(app, ["explore", "--example", "--no-browser", "--port", str(port)])
    assert shown.exit_code == 1
    assert f"port {port} cannot be opened (Address already in use): name another" in shown.output


def test_ctrl_c_ends_the_command_from_its_first_line_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before the server waits for requests, which takes a while where a browser has to open."""

    def interrupted(address: str) -> None:
        raise KeyboardInterrupt(address)

    monkeypatch.setattr("webbrowser.open", interrupted)
    shown = CliRunner().invoke(app, ["explore", "--example"])
    assert shown.exit_code == 0
    assert "ended" in shown.output


@pytest.fixture
def echo_port() -> Iterator[int]:
    """A server whose model takes a moment, so that posts have to wait for each other."""

    def answer(text: str) -> dict[str, Any]:
        time.sleep(0.002)
        return {"sentences": [{"text": text, "scores": [[None]]}]}

    server = make_server(answer, subject="echo", characters=100, tokens=16)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_two_hundred_posts_at_once_are_all_answered_by_few_threads(echo_port: int) -> None:
    before, start = threading.active_count(), threading.Barrier(201)
    found: dict[int, Any] = {}
    most = 0

    def post(number: int) -> None:
        start.wait()
        found[number] = sentence(echo_port, f"post {number}")

    clients = [threading.Thread(target=post, args=(number,)) for number in range(200)]
    for client in clients:
        client.start()
    start.wait()
    while any(client.is_alive() for client in clients):
        clients_left = sum(client.is_alive() for client in clients)
        most = max(most, threading.active_count() - before - clients_left)
        time.sleep(0.005)
    assert {number: status for number, (status, _) in found.items()} == dict.fromkeys(range(200), 200)
    assert all(body["sentences"][0]["text"] == f"post {number}" for number, (_, body) in found.items())
    assert most <= 2 * WORKERS  # workers are there before; each may have a timer


def test_slow_senders_do_not_keep_the_workers(echo_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each worker, none of which is ever silent for long."""
    monkeypatch.setattr(saobp.report.server, "DEADLINE", 0.5)
    head = f"POST /attention HTTP/1.1\r\nHost: 127.0.0.1:{echo_port}\r\nContent-Type: application/json\r\n"
    slow = [socket.create_connection(("127.0.0.1", echo_port), timeout=10) for _ in range(WORKERS)]
    for sender in slow:
        sender.sendall(f"{head}Content-Length: 1000\r\n\r\n".encode())
    ended = threading.Event()

    def dribble() -> None:
        while not ended.wait(0.1):
            for sender in slow:
                with suppress(OSError):
                    sender.sendall(b" ")

    dribbling = threading.Thread(target=dribble)
    dribbling.start()
    try:
        assert sentence(echo_port, "one two")[0] == 200
        assert [sender.recv(64).split()[1] for sender in slow] == [b"408"] * WORKERS
    finally:
        ended.set()
        dribbling.join()
        for sender in slow:
            sender.close()


def test_more_than_can_wait_are_told_so(echo_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saobp.report.server, "WAITING", 0)
    connection = socket.create_connection(("127.0.0.1", echo_port), timeout=10)
    assert connection.recv(64).startswith(b"HTTP/1.0 503")
    connection.close()


@pytest.mark.parametrize("length", ["9" * 5000, "1" * 400, "-1", "٣", "1e3", ""])
def test_a_length_that_is_no_small_number_is_refused(port: int, length: str) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        head = f"POST /attention HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
        assert connection.recv(64).split()[1] == b"413"
