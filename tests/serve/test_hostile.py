"""Hostile clients and hostile tenants get one error each, and cost the others nothing."""

from __future__ import annotations

import copy
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

httpx = pytest.importorskip("httpx")

from pykvcache.serve import http as serve_http  # noqa: E402
from pykvcache.serve import server  # noqa: E402
from serve.conftest import CHAT, KEYS, MESSAGES  # noqa: E402

DEEP = b"[" * 100_000 + b"]" * 100_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def connect(address: str) -> socket.socket:
    """Return a connection to a server."""
    url = urlsplit(address)
    return socket.create_connection((url.hostname, url.port), timeout=30)


def is_well(address: str) -> bool:
    """Whether the server answers within a second."""
    answer = httpx.post(address + CHAT, json={"messages": MESSAGES, "max_tokens": 1}, timeout=10)
    return bool(answer.status_code == 200)


def nested(depth: int, leaf: Any = 1) -> Any:
    """Return objects within objects."""
    for _ in range(depth):
        leaf = {"properties": {"a": leaf}, "type": "object"}
    return leaf


BODIES = [
    pytest.param(b'{"messages":' + DEEP + b"}", id="deep messages"),
    pytest.param(b'{"messages":[{"role":"user","content":"\xff"}]}', id="no UTF-8"),
    pytest.param(b'{"messages":[{"role":"user","content":"\\ud800"}]}', id="half a surrogate"),
    pytest.param({"messages": MESSAGES, "json_schema": nested(400)}, id="deep schema"),
    pytest.param({"messages": [{"role": "user", "content": nested(400)}]}, id="deep content"),
    pytest.param({"messages": MESSAGES, "chat_template_kwargs": {"a": nested(400)}}, id="deep"),
    pytest.param({"messages": MESSAGES, "chat_template_kwargs": {"template": "x"}}, id="template"),
    pytest.param({"messages": MESSAGES, "stop": ["x"] * 1000}, id="many stops"),
    pytest.param({"messages": MESSAGES, "stop": "a\0b", "n": 10**9}, id="many samples"),
    pytest.param({"messages": MESSAGES, "top_logprobs": 10**6}, id="many log-probabilities"),
    pytest.param({"messages": MESSAGES, "temperature": 1e308}, id="hot"),
    pytest.param({"messages": MESSAGES, "grammar": 'root ::= "a"{1,99999999}'}, id="repeats"),
    pytest.param(
        {"messages": MESSAGES, "grammar": 'root ::= (("a"?){0,90}){0,90}'}, id="empty repeats"
    ),
    pytest.param({"messages": MESSAGES, "tools": [TOOL] * 2}, id="two tools of one name"),
    pytest.param({"messages": [{"role": "user", "content": "a " * 10**6}]}, id="long prompt"),
    pytest.param({"messages": [{"role": "x\n", "tool_calls": [{"function": 3}]}]}, id="bad call"),
]


@pytest.mark.parametrize("body", BODIES)
def test_a_hostile_body_is_refused_at_once(address: str, body: Any) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    begin = time.monotonic()
    answer = httpx.post(address + CHAT, content=content, timeout=60)
    assert answer.status_code == 400, answer.text[:300]
    assert answer.json()["error"]["message"]
    assert time.monotonic() - begin < 20
    assert is_well(address)


FUNCTION = {"name": "w", "parameters": {"type": "object"}}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": FUNCTION}]},
            {"role": "tool", "tool_call_id": "1", "content": "y"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "none",
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
        "prompt_cache_options": {"ttl": "5m", "mode": "explicit"},
        "logit_bias": {"5": 1},
        "max_tokens": 1,
    },
    "/v1/messages": {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "w"}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
        ],
        "system": [{"type": "text", "text": "s"}],
        "tools": [{"name": "w", "input_schema": {}}],
        "tool_choice": {"type": "none"},
        "thinking": {"type": "disabled"},
        "diagnostics": {"previous_message_id": "x"},
        "output_config": {"effort": "low", "format": SCHEMA},
        "max_tokens": 1,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "function_call", "call_id": "1", "name": "w", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "o"},
        ],
        "text": {"format": SCHEMA},
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "none",
        "reasoning": {"effort": "low"},
        "max_output_tokens": 1,
    },
}


def replaced(thing: Any, value: Any) -> Iterator[Any]:
    """Yield copies of a body, each with another of its parts replaced."""
    if isinstance(thing, dict | list):
        for key in thing if isinstance(thing, dict) else range(len(thing)):
            for new in (value, *replaced(thing[key], value)):
                copied = copy.copy(thing)
                copied[key] = new
                yield copied


@pytest.mark.parametrize("path", WHOLE)
def test_a_field_of_the_wrong_type_is_a_client_error(address: str, path: str) -> None:
    with httpx.Client(base_url=address, timeout=60) as client:
        for value in (5, [1], {"a": 1}, "json_object"):
            for body in replaced(WHOLE[path], value):
                answer = client.post(path, json=body)
                assert answer.status_code < 500, (body, answer.text)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses"])
def test_deeply_nested_requests_of_the_other_apis_are_refused(address: str, path: str) -> None:
    deep = nested(400)
    body = {"model": "x", "max_tokens": 1, "messages": [{"role": "user", "content": [deep]}]}
    body |= {"input": [deep], "tools": [deep], "system": [deep]}
    assert httpx.post(address + path, json=body, timeout=60).status_code == 400
    assert is_well(address)


def test_an_ambiguous_grammar_does_not_stop_the_server(serve: Callable[..., str]) -> None:
    address, done = serve(models={"timeout": 5.0}), threading.Event()
    grammar = "root ::= x x x x x x x x\nx ::= [a-z ]? y\ny ::= [a-z ]* | [a-z]* | [ -~]*"

    def attack() -> None:
        body = {"messages": MESSAGES, "grammar": grammar, "max_tokens": 200}
        httpx.post(address + CHAT, json=body, timeout=60)
        done.set()

    threading.Thread(target=attack, daemon=True).start()
    for _ in range(3):
        assert is_well(address)
    assert done.wait(50)


def test_a_body_without_end_is_refused(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_http, "BODY_SECONDS", 0.5)
    address = serve()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{{"
    with connect(address) as one:
        one.sendall(head.encode())
        assert b" 408 " in one.recv(1000)


def test_bodies_together_are_bounded(serve: Callable[..., str]) -> None:
    address = serve(max_body=1000)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"
    held = [connect(address) for _ in range(10)]
    for one in held:
        one.sendall(head.encode() + b" " * 999)
    end = time.monotonic() + 20
    while len(answered := select.select(held, [], [], 0.3)[0]) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert [b" 429 " in one.recv(1000) for one in answered] == [True, True]
    for one in held:
        one.close()
    time.sleep(0.2)
    assert is_well(address)


def test_a_connection_that_sends_no_headers_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    from serve.conftest import serving

    monkeypatch.setattr(server, "IDLE_SECONDS", 0.3)
    with serving(http=server.PatientProtocol) as address:
        with connect(address) as silent, connect(address) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
            assert silent.recv(100) == b""
            assert slow.recv(100) == b""
        with connect(address) as busy:
            sent = json.dumps({"messages": MESSAGES, "max_tokens": 400, "temperature": 1}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(sent)}\r\n\r\n"
            busy.sendall(head.encode() + sent)
            assert b" 200 " in busy.recv(100), "one that waits for an answer is not idle"


# Web pages ----------------------------------------------------------------------------------------


def test_a_server_without_keys_refuses_pages_of_other_sites(address: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1}
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        answer = httpx.post(address + CHAT, json=body, headers=headers)
        assert answer.status_code == 403
    local = httpx.post(address + CHAT, json=body, headers={"Origin": "http://localhost:3000"})
    assert local.headers["access-control-allow-origin"] == "http://localhost:3000"
    asked = httpx.request("OPTIONS", address + CHAT, headers={"Origin": "http://[::1]:3000"})
    assert asked.status_code == 200
    assert "Authorization" in asked.headers["access-control-allow-headers"]


def test_a_path_cannot_write_into_the_log(address: str) -> None:
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("pykvcache.serve"), Handler()
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        httpx.get(f"{address}/x%0A2026-01-01%20POST%20/forged")
        until = time.monotonic() + 10
        while not any("forged" in line for line in lines):
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        logger.removeHandler(handler)
    assert not any("\n" in line for line in lines)


# Tenants ------------------------------------------------------------------------------------------


def test_a_hostile_tenant_finds_no_data_of_another(serve: Callable[..., str]) -> None:
    address = serve(keys=KEYS)
    ann, bob = ({"x-api-key": key} for key in KEYS)
    secret = "The word of the day is kite and nobody must know it. " * 6

    def ask(headers: dict[str, str], path: str = CHAT, **body: Any) -> Any:
        sent = {"messages": [{"role": "user", "content": secret}], "max_tokens": 1, **body}
        return httpx.post(address + path, json=sent, headers=headers, timeout=60).json()

    stored = ask(ann, "/v1/responses", input=secret, max_output_tokens=1)["id"]
    message = ask(ann, "/v1/messages", model="x")["id"]
    ask(ann)
    for more in (
        {"prompt_cache_key": "ann"},
        {"prompt_cache_key": "ann", "prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
        {"namespace": "ann", "user": "ann", "tenant": "ann"},
    ):
        ask(bob, "/cache/clear")
        assert ask(bob, **more)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert ask(bob, "/cache/pin", ttl=60)["n_tokens"] < len(secret)
    for path in (f"/v1/responses/{stored}", f"/v1/responses/..%2F{stored}"):
        assert httpx.get(address + path, headers=bob).status_code == 404
    found = ask(bob, "/v1/messages", model="x", diagnostics={"previous_message_id": message})
    reason = found["diagnostics"]["cache_miss_reason"]
    assert reason == {"type": "previous_message_not_found"}
    ask(bob, "/cache/pin", ttl=60)
    ask(bob, "/cache/clear", messages=None)
    seen = httpx.get(f"{address}/cache", headers=bob).json()
    assert "[" not in seen["models"]["stories"]["tree"], "what bob pinned went with the rest"
    assert ask(ann)["usage"]["prompt_tokens_details"]["cached_tokens"] > 50


def test_a_guessed_key_opens_nothing(serve: Callable[..., str]) -> None:
    address = serve(keys=KEYS)
    body = {"messages": MESSAGES, "max_tokens": 1}
    for header in (
        "",
        "Bearer",
        "Basic key-of-ann",
        "bearer KEY-OF-ANN",
        "Bearer \xe9",
        "Bearer key",
    ):
        headers = {"Authorization": header.encode("latin-1")}
        assert httpx.post(address + CHAT, json=body, headers=headers).status_code == 401
        for path in ("/cache", "/metrics", "/slots", "/props", "/v1/models", "/v1/responses/x"):
            answer = httpx.get(address + path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
    for right in ({"Authorization": "Bearer key-of-ann"}, {"x-api-key": "key-of-ann"}):
        assert httpx.post(address + CHAT, json=body, headers=right).status_code == 200
    assert httpx.get(f"{address}/health").status_code == 200


def test_prefetches_do_not_delay_other_requests(serve: Callable[..., str]) -> None:
    address = serve()
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            httpx.post(f"{address}/cache/prefetch", json={"messages": MESSAGES}, timeout=60)

    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        assert is_well(address)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
