"""Breakpoints, boundaries, thinking and stored responses in the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

httpx = pytest.importorskip("httpx")

from pykvcache import LLM, embedded_model_path  # noqa: E402
from pykvcache.serve import Responses  # noqa: E402
from pykvcache.serve.engine import Engine  # noqa: E402
from pykvcache.serve.pins import PinBoard  # noqa: E402
from pykvcache.serve.prompts import chat_prompt  # noqa: E402
from serve.conftest import CHAT, KEYS  # noqa: E402
from support.models import make_model  # noqa: E402

STORY = "The sea is blue and the mill is old. Ben works there with Tom and his brown dog. " * 4
BREAK = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with LLM(embedded_model_path(), n_ctx=2048, ram_bytes=8 << 20) as llm:
        yield Engine("stories", llm)


def details(answer: Any) -> dict[str, int]:
    found: dict[str, int] = answer.json()["usage"]["prompt_tokens_details"]
    return found


def ask(address: str, parts: list[Any], **body: Any) -> dict[str, int]:
    messages = [{"role": "user", "content": parts}]
    sent = {"messages": messages, "max_tokens": 2, **body}
    return details(httpx.post(address + CHAT, json=sent, timeout=60))


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


@pytest.mark.parametrize("name", ["llama", "llama_bpe"])
def test_chatml_of_a_model_without_a_template_begins_with_bos_if_the_model_adds_it(
    name: str, model_folder: Path
) -> None:
    with LLM(os.fspath(make_model(name, model_folder)), n_ctx=512) as llm:
        model, prompt = (
            llm.model,
            chat_prompt(Engine("base", llm), [{"role": "user", "content": "x"}]),
        )
        start = [model.token_bos] if model.add_bos else []
        text = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
        rest = model.tokenize(text, add_special=False, parse_special=True)
        assert prompt.tokens.tolist() == [*start, *rest.tolist()]


def test_explicit_mode_writes_up_to_the_breakpoint_and_no_token_more(
    serve: Callable[..., str],
) -> None:
    address = serve()
    options = {"prompt_cache_options": {"mode": "explicit"}}
    first = ask(address, [part(STORY, **BREAK), part("Where is Ben, who has a kite?")], **options)
    written = first["cache_write_tokens"]
    assert written > 64
    assert written % 64, "a breakpoint at the end of a block would prove nothing"
    second = ask(address, [part(STORY), part("Where is Ben, who has a kite?")])
    assert second["cached_tokens"] == written


def test_explicit_mode_without_breakpoints_does_not_use_the_cache(
    serve: Callable[..., str],
) -> None:
    address = serve()
    for _ in range(2):
        found = ask(address, [part(STORY)], prompt_cache_options={"mode": "explicit"})
        assert found == {"cached_tokens": 0, "cache_write_tokens": 0}


def test_a_long_conversation_may_have_breakpoints_in_every_turn(address: str) -> None:
    turn = [part(STORY[:80], prompt_cache_breakpoint={"mode": "explicit"})]
    messages = [{"role": "user", "content": turn}, {"role": "assistant", "content": "Yes."}] * 6
    answer = httpx.post(address + CHAT, json={"messages": messages[:-1], "max_tokens": 1})
    assert answer.status_code == 200


@pytest.mark.parametrize("ttl", [0, -1, "soon", "9999d", True, float("1e300"), "٣m"])
def test_an_invalid_ttl_is_refused(address: str, ttl: Any) -> None:
    parts = [part(STORY, prompt_cache_breakpoint={"mode": "explicit", "ttl": ttl})]
    sent = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    answer = httpx.post(address + CHAT, json=sent)
    assert answer.status_code == 400
    assert "ttl" in answer.json()["error"]["message"]


def test_reasoning_is_not_cached(thinker: str) -> None:
    address = thinker
    prompt = "<|im_start|>user\n" + STORY + "<|im_end|>\n<|im_start|>assistant\n"
    sent = {"messages": [{"role": "user", "content": STORY}], "max_tokens": 80, "temperature": 0}
    text = httpx.post(address + CHAT, json=sent, timeout=60).json()["choices"][0]["message"]
    words = (text.get("reasoning_content") or "") + (text["content"] or "")
    found = httpx.post(
        f"{address}/v1/completions", json={"prompt": prompt + words, "max_tokens": 1}, timeout=60
    )
    n = len(httpx.post(f"{address}/tokenize", json={"content": prompt}).json()["tokens"])
    assert details(found)["cached_tokens"] <= n + 1


# Places in prompts --------------------------------------------------------------------------------


def test_ends_of_messages_are_where_their_texts_end(engine: Engine) -> None:
    messages = [
        {"role": "user", "content": "Lucy has a red kite. What has Tom?"},
        {"role": "assistant", "content": "  A brown dog. "},
        {"role": "user", "content": "Who works at the mill?"},
    ]
    prompt = chat_prompt(engine, messages)
    model = engine.llm.model
    for end, message in zip(prompt.ends, messages, strict=True):
        text = model.detokenize(prompt.tokens[:end], special=True)
        assert text.rstrip('"').endswith(message["content"].strip()[:-1])


def test_breakpoints_do_not_change_the_rendered_prompt(engine: Engine) -> None:
    messages = [{"role": "user", "content": [part("What has Tom?", **BREAK)]}]
    plain = [{"role": "user", "content": "What has Tom?"}]
    tokens = engine.llm.chat_tokens(plain)
    np.testing.assert_array_equal(chat_prompt(engine, messages).tokens, tokens)


# Pins ---------------------------------------------------------------------------------------------


def test_pins_of_one_tenant_do_not_evict_those_of_another(engine: Engine) -> None:
    llm = engine.llm
    board = PinBoard(llm)
    rng = np.random.default_rng(0)

    def known(tenant: str) -> Any:
        tokens = rng.integers(3, 800, 130, dtype=np.int32)
        llm.generator.submit(tokens, 1, namespace=tenant).wait()
        return tokens

    mine = known("ann")
    assert board.pin(mine, 600, "ann") > 64
    for _ in range(60):
        board.pin(known("eve"), 600, "eve")
    kept = llm.cache.sequence(mine, namespace="ann")
    assert kept.reuse.ram > 64
    kept.close()
    stats = llm.cache.stats()
    assert stats.ram_bytes <= stats.max_ram_bytes


def test_a_renewed_pin_replaces_the_old_one(engine: Engine) -> None:
    board = PinBoard(engine.llm)
    tokens = np.arange(3, 203, dtype=np.int32)
    engine.llm.generator.submit(tokens, 1, namespace="ann").wait()
    for _ in range(5):
        assert board.pin(tokens, 600, "ann") > 64
    assert len(board) == 1


# Stored responses ---------------------------------------------------------------------------------


def test_stored_responses_outlive_the_server(serve: Callable[..., str], tmp_path: Path) -> None:
    sent = {"input": "Lucy has a red kite.", "max_output_tokens": 4}
    ann, bob = ({"x-api-key": key} for key in KEYS)
    options = {"keys": KEYS}
    one = serve(**options, stored=Responses([tmp_path]))
    first = httpx.post(f"{one}/v1/responses", json=sent, headers=ann).json()
    two = serve(**options, stored=Responses([tmp_path]))
    path = f"{two}/v1/responses"
    found = httpx.get(f"{path}/{first['id']}", headers=ann).json()
    assert found == first
    more = {"input": "And Tom?", "previous_response_id": first["id"], "max_output_tokens": 2}
    assert httpx.post(path, json=more, headers=bob).status_code == 404
    assert httpx.post(path, json=more, headers=ann).json()["usage"]["input_tokens"] > 20
    assert httpx.delete(f"{path}/{first['id']}", headers=bob).status_code == 404
    assert httpx.delete(f"{path}/{first['id']}", headers=ann).status_code == 200
    again = Responses([tmp_path])
    with pytest.raises(Exception, match="not stored"):
        again.get(first["id"], "ann")


def test_stored_responses_are_encrypted_and_bounded(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from pykvcache.serve.responses import Stored

    stored = Responses([tmp_path], secret="a secret of sixteen", max_bytes=1000)
    for i in range(20):
        stored.add(Stored({"id": f"resp_{i}"}, [{"role": "user", "content": "kite" * 30}]), "ann")
    assert stored.n_bytes <= 1000
    assert stored.get("resp_0", "ann").messages[0]["role"] == "user"
    stored.close()
    files = [path.read_bytes() for path in tmp_path.rglob("*.block")]
    assert len(files) == 20
    assert not any(b"kite" in data for data in files)
