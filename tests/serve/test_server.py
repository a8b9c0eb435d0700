"""Errors, tenants, load and life of the server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec")
httpx = pytest.importorskip("httpx")

from pykvcache import LlamaModel, embedded_model_path  # noqa: E402
from pykvcache.errors import ArgumentError  # noqa: E402
from pykvcache.sampling import SETTINGS  # noqa: E402
from pykvcache.serve.prompts import sampler_of  # noqa: E402
from pykvcache.serve.schemas import CompletionRequest, ResponseRequest  # noqa: E402
from serve.conftest import CHAT, MESSAGES  # noqa: E402

BAD = [
    (b"{", 400, None),
    (b"[]", 400, None),
    ({}, 400, None),
    ({"messages": []}, 400, "messages"),
    ({"messages": "x"}, 400, "messages"),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None),
    ({"messages": MESSAGES, "temperature": "hot"}, 400, "temperature"),
    ({"messages": MESSAGES, "temperature": -1}, 400, "temperature"),
    ({"messages": MESSAGES, "n": 0}, 400, "n"),
    ({"messages": MESSAGES, "grammar": "root ::= ("}, 400, None),
    ({"messages": MESSAGES, "response_format": {"type": "sound"}}, 400, "response_format"),
    ({"messages": MESSAGES, "logit_bias": {"999999": 1}}, 400, None),
    ({"messages": [{"role": "user", "content": "kite " * 5000}]}, 400, "messages"),
    ({"messages": MESSAGES, "dry_sequence_breakers": [""]}, 400, "dry_sequence_breakers"),
    ({"messages": MESSAGES, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"messages": MESSAGES, "top_logprobs": 2}, 400, "top_logprobs"),
    ({"messages": MESSAGES, "functions": [{"name": "f"}]}, 400, "functions"),
]
BAD += [({"messages": MESSAGES, name: one.high + 1}, 400, name) for name, one in SETTINGS.items()]


@pytest.mark.parametrize(("body", "status", "param"), BAD)
def test_bad_requests_get_one_error_object(
    address: str, body: Any, status: int, param: Any
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(address + CHAT, content=content)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"] in ("invalid_request_error", "exceed_context_size_error")
    if param is not None:
        assert error["param"] == param
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_a_completion_that_is_too_long_names_its_prompt(address: str, path: str) -> None:
    answer = httpx.post(address + path, json={"prompt": "kite " * 5000})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "suffix": "y"}),
        ("/v1/completions", {"prompt": "x", "best_of": 2}),
        ("/v1/responses", {"input": "x", "conversation": "conv_1"}),
        ("/v1/responses", {"input": "x", "prompt": {"id": "pmpt_1"}}),
    ],
)
def test_what_would_change_the_answer_is_refused_not_ignored(
    address: str, path: str, body: Any
) -> None:
    answer = httpx.post(address + path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == list(body)[-1]


def test_every_setting_reaches_the_sampler() -> None:
    """Also by the names that llama-server has for them."""
    with LlamaModel(embedded_model_path()) as model:
        llm = SimpleNamespace(model=model, context=SimpleNamespace(n_ctx_seq=512))
        engine: Any = SimpleNamespace(llm=llm, defaults=SimpleNamespace(sampling={}))

        def sampler(**fields: Any) -> str:
            request = msgspec.convert({"prompt": "x", **fields}, CompletionRequest)
            return repr(sampler_of(request, engine))

        for name, one in SETTINGS.items():
            value = one.kind(one.low if one.default == one.high else one.high)
            assert f"{name}={value!r}" in sampler(**{name: value})
        assert "dry_sequence_breakers=('!',)" in sampler(dry_sequence_breakers=["!"])
        assert "penalty_last_n=512" in sampler(repeat_last_n=-1)
        assert "dry_last_n=7" in sampler(dry_penalty_last_n=7)
        assert sampler(top_k=-1) == sampler(top_k=0)
        off = sampler(adaptive_target=-1, top_n_sigma=-1, penalty_last_n=-1)
        assert off == sampler(penalty_last_n=512)
        order = ["penalties", "typ_p", "top_k", "temperature", "infill"]
        assert "stages=('penalties', 'typical_p', 'top_k', 'temperature')" in sampler(
            samplers=order
        )
        assert msgspec.convert({"prompt": "x", "n_cmpl": 3}, CompletionRequest).n == 3
        for wrong in ({"dry_sequence_breakers": ["!"] * 17}, {"lora": [{"id": 0, "scale": 1}]}):
            with pytest.raises(msgspec.ValidationError):
                sampler(**wrong)
        with pytest.raises(msgspec.ValidationError, match="lora"):
            msgspec.convert({"input": "x", "lora": [{"id": 0}]}, ResponseRequest)
        with pytest.raises(ArgumentError, match="not a stage"):
            sampler(samplers=[""])


def test_props_describe_the_model_as_in_llama_server(address: str) -> None:
    found = httpx.get(f"{address}/props").json()
    with LlamaModel(embedded_model_path()) as model:
        for name, token in (("bos_token", model.token_bos), ("eos_token", model.token_eos)):
            assert token is not None
            assert model.tokenize(found[name], add_special=False, parse_special=True) == [token]
    assert found["modalities"] == {"vision": False, "audio": False}
    n_ctx = found["default_generation_settings"]["n_ctx"]
    slots = httpx.get(f"{address}/slots").json()
    assert found["total_slots"] == len(slots)
    assert {one["n_ctx"] for one in slots} == {n_ctx}


def test_unknown_paths_and_large_bodies_are_refused(serve: Callable[..., str]) -> None:
    address = serve(max_body=1000)
    assert httpx.get(f"{address}/nothing").status_code == 404
    assert httpx.post(address + CHAT, content=b"x" * 2000).status_code == 413


def test_a_full_queue_answers_429_with_retry_after(serve: Callable[..., str]) -> None:
    address = serve(llm={"n_parallel": 1}, models={"max_waiting": 2})

    async def ask(client: Any) -> Any:
        return await client.post(
            address + CHAT, json={"messages": MESSAGES, "max_tokens": 300, "temperature": 1}
        )

    async def run() -> list[Any]:
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*(ask(client) for _ in range(12)))

    answers = asyncio.run(run())
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert all("retry-after" in one.headers for one in answers if one.status_code == 429)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_disconnects_frees_its_place(
    serve: Callable[..., str], is_stream: bool
) -> None:
    address = serve(llm={"n_parallel": 1})
    body = {"messages": MESSAGES, "max_tokens": 1900, "stream": is_stream, "ignore_eos": True}
    if is_stream:
        with httpx.stream("POST", address + CHAT, json=body, timeout=30) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.TimeoutException):
            httpx.post(address + CHAT, json=body, timeout=0.3)
    until = time.monotonic() + 10
    while httpx.get(f"{address}/cache").json()["models"]["stories"]["running"]:
        assert time.monotonic() < until, "the request still runs"
        time.sleep(0.05)


def test_a_timeout_ends_a_request_with_its_text_so_far(serve: Callable[..., str]) -> None:
    address = serve(models={"timeout": 0.5}, llm={"n_ctx": 8192})
    body = {"prompt": "Once", "max_tokens": 8000, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(address + "/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert 0 < answer.json()["usage"]["completion_tokens"] < 8000


def test_why_shows_where_transcripts_diverge(address: str) -> None:
    before = [{"role": "user", "content": "Lucy has a red kite."}]
    after = [{"role": "user", "content": "Lucy has a brown dog."}]
    found = httpx.post(f"{address}/cache/why", json={"before": before, "after": after}).json()
    assert found["first_difference"] == found["tokens_shared"] > 0
    assert found["message"] == 0
    assert "red" in found["before"]
    assert "brown" in found["after"]


def test_prefixes_are_pinned_and_metrics_are_exported(address: str) -> None:
    httpx.post(address + CHAT, json={"messages": MESSAGES, "max_tokens": 1})
    assert (
        httpx.post(f"{address}/cache/pin", json={"messages": MESSAGES, "ttl": 60}).json()[
            "n_tokens"
        ]
        > 0
    )
    assert 'pykvcache_requests_running{model="stories"}' in httpx.get(f"{address}/metrics").text
    assert "<!doctype html>" in httpx.get(f"{address}/").text


def start(*options: str, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Start ``pykvcache serve`` on a free port; return the process and its address."""
    command = [
        sys.executable,
        "-m",
        "pykvcache",
        "serve",
        "--port",
        "0",
        "--tier-seconds",
        "5",
        "--cache",
        os.fspath(folder),
    ]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:  # warnings of llama.cpp come first
        if "pykvcache serves http" in line:
            return process, line.split()[2]
    raise AssertionError("the server ended before it began")


def ask(address: str) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": "Lucy has a red kite. " * 20}],
        "max_tokens": 2,
    }
    found: dict[str, Any] = httpx.post(address + CHAT, json=body, timeout=60).json()["usage"]
    return found


def test_a_restarted_server_reuses_prefixes(tmp_path: Path) -> None:
    process, address = start(folder=tmp_path)
    assert ask(address)["prompt_tokens_details"]["cached_tokens"] == 0
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode in (0, -signal.SIGTERM)
    assert log.count("POST") == 1, "one line per request"
    assert "llama_model_loader" not in log
    process, address = start(folder=tmp_path)
    try:
        usage = ask(address)
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] // 2
    finally:
        process.kill()
        process.communicate()


def test_other_machines_need_keys(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pykvcache", "serve", "--host", "0.0.0.0", "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert found.returncode == 2
    assert "--api-keys" in found.stderr


def test_a_taken_port_is_an_error_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "pykvcache", "serve", "--port", str(port)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 1
    assert f"port {port} on 127.0.0.1: " in found.stderr
    assert "chat template" not in found.stderr  # which loading the model logs


def test_the_short_option_for_threads_of_llama_server_is_refused() -> None:
    command = [sys.executable, "-m", "pykvcache", "serve", "-t", "8"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 2


def test_lists_of_llama_server_with_commas_are_refused() -> None:
    for option in ("--api-key", "--alias"):
        command = [sys.executable, "-m", "pykvcache", "serve", "--port", "0", option, "a,b"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert found.returncode != 0
        assert option in found.stderr


def test_a_wrong_model_or_adapter_is_an_error_at_the_start(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    for options in (("-m", os.fspath(broken)), ("--lora", os.fspath(broken))):
        command = [sys.executable, "-m", "pykvcache", "serve", "--port", "0", *options]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert found.returncode == 1
        assert "broken.gguf" in found.stderr
        assert "Traceback" not in found.stderr


def test_the_first_signal_drains_and_the_second_ends(tmp_path: Path) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    process, address = start("--n-ctx", "8192", folder=tmp_path)
    try:
        with httpx.stream("POST", address + CHAT, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert process.poll() is None, "the request still runs"
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{address}/health", timeout=5)
            assert any(next(lines) for _ in range(4))
            process.send_signal(signal.SIGTERM)
            process.wait(10)
        assert process.returncode == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


def test_operators_set_defaults(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ greeting }} {{ messages[0].content }}")
    process, address = start(
        *("--temperature", "0", "--chat-template", os.fspath(template)),
        *("--chat-template-kwargs", '{"greeting": "Once upon"}'),
        folder=tmp_path / "cache",
    )
    try:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "a time"}]}
        rendered = httpx.post(f"{address}/apply-template", json=body, timeout=60).json()["prompt"]
        assert rendered == "Once upon a time"
        body["chat_template_kwargs"] = {"greeting": "Twice upon"}
        rendered = httpx.post(f"{address}/apply-template", json=body).json()["prompt"]
        assert rendered == "Twice upon a time"
        body |= {"max_tokens": 8, "n": 2}
        answer = httpx.post(address + CHAT, json=body, timeout=60).json()
        assert len({choice["message"]["content"] for choice in answer["choices"]}) == 1
        body["chat_template_kwargs"] = {"template": "x"}
        assert httpx.post(f"{address}/apply-template", json=body).status_code == 400
    finally:
        process.kill()
        process.communicate()
