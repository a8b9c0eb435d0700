"""LLM: what it generates, chats and embeds is what its parts give, and prefixes are shared."""

from __future__ import annotations

import asyncio
import gc
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykvcache import (
    LLM,
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    PrefixCache,
    Sampler,
    embedded_model_path,
)
from pykvcache.errors import (
    ArgumentError,
    ClosedError,
    ContextCreateError,
    GrammarError,
    ModelLoadError,
    StoreError,
)
from pykvcache.prefix.node import Component
from pykvcache.prefix.policies import ByPriority
from support.chat_formats import WEATHER
from support.logprobs import log_probabilities
from support.models import make_model

pytest.importorskip("jinja2")

START = "Lucy has a red kite. Tom is a baker. Lucy and Tom went to the park and"
MESSAGES = [{"role": "user", "content": "Tell me of a kite."}]
#: Tools as Hermes and Qwen write them, in a template of a few lines.
TOOLS_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n# Tools\nFunctions are in <tools></tools> tags:\n<tools>"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n"
    "Return calls within <tool_call></tool_call> tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    "{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Rome", "days": 2}}\n</tool_call>'
)
SCHEMA = {
    "type": "object",
    "properties": {"owner": {"enum": ["Lucy", "Tom"]}, "red": {"type": "boolean"}},
    "required": ["owner", "red"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(embedded_model_path(), n_ctx=4096, n_parallel=4, ram_bytes=64 << 20) as llm:
        yield llm


def writes(llm: LLM, text: str) -> Sampler:
    """A sampler with which the model writes a text where its grammar lets it."""
    wanted = iter(llm.model.tokenize(text, add_special=False, parse_special=True).tolist())

    def prefer(ids: np.ndarray[Any, Any], logits: np.ndarray[Any, Any]) -> None:
        logits[ids == next(wanted, llm.model.token_eos)] += 1e4

    return Sampler(temperature=0, stages=[prefer])


def is_idle(llm: LLM) -> bool:
    return llm.generator.n_running + llm.generator.n_waiting == 0


# Text ---------------------------------------------------------------------------------------------


def test_one_text_is_what_a_sequence_gives(llm: LLM) -> None:
    found = llm.generate(START, max_tokens=16, logprobs=2)
    with LlamaContext(llm.model, n_ctx=512) as ctx, LlamaSequence(ctx, START) as sequence:
        generation = sequence.generate(16, logprobs=2)
        assert found.tokens.tolist() == list(generation)
    assert found.finish_reason == "length"
    assert found.text == llm.model.detokenize(np.append(llm.tokens_of("a")[-1:], found.tokens))[1:]
    for mine, right in zip(found.logprobs, generation.logprobs, strict=True):
        assert max(mine, key=mine.__getitem__) == max(right, key=right.__getitem__)
        assert max(mine.values()) == pytest.approx(max(right.values()), abs=0.05)


def test_memories_that_cannot_share_cells_give_each_sequence_its_own(model_folder: Path) -> None:
    path = make_model("glm5_next", model_folder)
    with LLM(path, n_ctx=2048, ram_bytes=0) as llm:
        assert not llm.context.kv_unified
        assert len(llm.generate(["a b", "a c"], max_tokens=2)) == 2
    with pytest.raises(ContextCreateError, match="n_seq_max=1"):
        LLM(path, n_ctx=2048, kv_unified=True)


def test_many_prompts_keep_their_order_and_share_prefixes(llm: LLM) -> None:
    prompts = [f"{START} {word}" for word in ("ran", "sang", "baked", "slept") * 3]
    alone = [llm.generate(prompt, max_tokens=6).text for prompt in prompts[:4]]
    found = llm.generate(prompts, max_tokens=6, progress=False)
    assert [one.text for one in found] == alone * 3
    assert all(one.reuse.evaluated < 8 for one in found)
    ids = [llm.tokens_of(prompt) for prompt in prompts]
    assert [one.text for one in llm.generate(ids, max_tokens=6)] == alone * 3
    assert llm.generate([], max_tokens=6) == []


def test_samples_share_the_evaluation_and_say_so(llm: LLM) -> None:
    llm.cache.clear()
    prompts = [START, "One day Ben saw a big dog. The dog was"]
    found = llm.generate(prompts, n=3, max_tokens=8, sampler=Sampler(seed=7))
    assert [len(group) for group in found] == [3, 3]
    for prompt, group in zip(prompts, found, strict=True):
        n = len(llm.tokens_of(prompt))
        assert [one.reuse.n_tokens for one in group] == [n] * 3
        assert [one.reuse.evaluated for one in group[1:]] == [0, 0]
        assert group[0].reuse.evaluated > 0
        assert len({one.text for one in group}) == 3
        assert group[1].usage["prompt_tokens"] == n
        assert group[1].usage["prompt_tokens_details"]["cached_tokens"] == n
    again = llm.generate(prompts, n=3, max_tokens=8, sampler=Sampler(seed=7))
    assert [[one.text for one in group] for group in again] == [
        [one.text for one in group] for group in found
    ]
    one = llm.generate(START, n=2, max_tokens=4, sampler=Sampler(seed=7))
    assert [len(each.tokens) for each in one] == [4, 4]


def test_stops_and_limits(llm: LLM) -> None:
    text = llm.generate(START, max_tokens=20, stop=None).text
    found = llm.generate(START, max_tokens=20, stop=[text[10:13]])
    assert (found.text, found.finish_reason) == (text[:10], "stop")
    assert llm.generate(START, max_tokens=0).text == ""
    with LLM(embedded_model_path(), n_ctx=256, n_parallel=1) as small:
        assert small.generate(START, max_tokens=None).finish_reason in ("stop", "full")


def test_an_error_leaves_nothing_behind(llm: LLM) -> None:
    for bad in ([START, []], [START, [10**6]], [START, 3.5]):
        with pytest.raises((ArgumentError, TypeError, ValueError, IndexError)):
            llm.generate(bad, max_tokens=4)  # type: ignore[call-overload]
        gc.collect()
        llm.generator.run()
        assert is_idle(llm)
    assert llm.generate(START, max_tokens=2).finish_reason == "length"


def test_prefixes_survive_the_process(tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache": tmp_path / "blocks", "n_ctx": 1024, "tier_seconds": 10}
    long = " ".join([START] * 12)
    with LLM(embedded_model_path(), **options) as llm:
        first = llm.generate(long, max_tokens=4)
        assert first.reuse.disk == 0
    with LLM(embedded_model_path(), **options) as llm:
        second = llm.generate(long, max_tokens=4)
        assert second.text == first.text
        assert second.reuse.disk > 64


# Chat ---------------------------------------------------------------------------------------------


def test_folders_have_the_given_limit(tmp_path: Path) -> None:
    places = [tmp_path / "one", str(tmp_path / "two")]
    options: dict[str, Any] = {"n_ctx": 512, "cache": places, "folder_bytes": 4 << 20}
    with LLM(embedded_model_path(), **options) as llm:
        for i in range(50):
            llm.generate(f"{i}: Lucy has a red kite. Tom has a brown dog. " * 4, max_tokens=1)
        assert llm.cache.flush(60)
    for place in places:
        size = sum(path.stat().st_size for path in Path(place).rglob("*") if path.is_file())
        assert 1 << 20 < size <= 4 << 20
    with pytest.raises(StoreError, match="max_bytes is 1: it must be at least"):
        LLM(embedded_model_path(), cache=places, folder_bytes=1)


def test_a_chat_is_the_rendered_text_continued(llm: LLM) -> None:
    answer = llm.chat(MESSAGES, max_tokens=12, template=TOOLS_TEMPLATE)
    tokens = llm.chat_tokens(MESSAGES, template=TOOLS_TEMPLATE)
    assert answer.content.strip() == llm.generate([tokens], max_tokens=12)[0].text.strip()
    assert answer.tool_calls == ()
    assert answer.usage["completion_tokens"] == len(answer.completion.tokens)
    turns = [*MESSAGES, answer.message.to_dict(), {"role": "user", "content": "And then?"}]
    second = llm.chat(turns, max_tokens=4, template=TOOLS_TEMPLATE)
    assert (
        second.completion.reuse.evaluated < len(llm.chat_tokens(turns, template=TOOLS_TEMPLATE)) / 2
    )


def test_tools_are_called_with_arguments_of_their_schema(llm: LLM) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = llm.chat(
            MESSAGES,
            tools=[WEATHER],
            tool_choice=choice,  # type: ignore[arg-type]
            template=TOOLS_TEMPLATE,
            sampler=writes(llm, CALL),
            max_tokens=200,
        )
        (call,) = answer.tool_calls
        assert (call.name, call.arguments) == ("get_weather", {"place": "Rome", "days": 2})
    assert answer.message.to_dict()["tool_calls"][0]["function"]["name"] == "get_weather"


def test_content_follows_a_schema(llm: LLM) -> None:
    pieces = enumerate(llm.model.token_to_piece(t) for t in range(llm.model.n_vocab))
    no_space = {t: -100.0 for t, piece in pieces if piece.strip() != piece}
    for sampler in (
        Sampler(temperature=0, logit_bias=no_space),
        Sampler(seed=1, logit_bias=no_space),
        writes(llm, '{"owner": "Tom", "red": true}'),
    ):
        answer = llm.chat(
            MESSAGES, json_schema=SCHEMA, template=TOOLS_TEMPLATE, max_tokens=64, sampler=sampler
        )
        value = json.loads(answer.content)
        assert value["owner"] in ("Lucy", "Tom")
        assert isinstance(value["red"], bool)


def test_streams_give_the_content_and_end_when_they_are_left(llm: LLM) -> None:
    async def main() -> tuple[str, str]:
        whole = [
            piece
            async for piece in llm.stream_chat(MESSAGES, max_tokens=16, template=TOOLS_TEMPLATE)
        ]
        begun = ""
        async for piece in llm.stream_chat(MESSAGES, template=TOOLS_TEMPLATE, max_tokens=None):
            begun += piece
            if len(begun) > 3:
                break
        return "".join(whole), begun

    whole, begun = asyncio.run(main())
    gc.collect()
    assert whole.startswith(begun[:4])
    assert whole == llm.chat(MESSAGES, max_tokens=16, template=TOOLS_TEMPLATE).content
    assert is_idle(llm)


# Embeddings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_embeddings_of_many_texts_are_those_of_each(name: str, model_folder: Path) -> None:
    with LLM(make_model(name, model_folder)) as llm:
        rng = np.random.default_rng(1)
        texts = [
            rng.integers(20, 90, n).astype(np.int32) for n in (5, 40, 1, 17, 64, 3, 9, 30, 2, 50)
        ]
        rows = llm.embed(texts)
        assert rows.shape == (len(texts), llm.model.n_embd)
        assert rows.dtype == np.float32
        assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
        for text, row in zip(texts, rows, strict=True):
            assert np.abs(llm.embed([text])[0] - row).max() < 0.01
        for bad in ([[]], [np.zeros(10**5, np.int32)]):
            with pytest.raises(ArgumentError):
                llm.embed(bad)  # type: ignore[arg-type]


# As llama-cpp-python has it -----------------------------------------------------------------------

USAGE = {"prompt_tokens", "completion_tokens", "total_tokens"}


def test_a_completion_has_the_members_that_clients_know(llm: LLM) -> None:
    found = llm.create_completion(START, max_tokens=8, temperature=0, logprobs=2)
    assert isinstance(found, dict)
    assert found["object"] == "text_completion"
    assert found["id"].startswith("cmpl-")
    assert isinstance(found["created"], int)
    assert set(found["usage"]) >= USAGE
    (choice,) = found["choices"]
    assert set(choice) == {"text", "index", "logprobs", "finish_reason"}
    assert choice["finish_reason"] == "length"
    assert choice["text"] == llm.generate(START, max_tokens=8).text
    names = {"tokens", "text_offset", "token_logprobs", "top_logprobs"}
    assert set(choice["logprobs"]) == names
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])
    echoed = llm(START, max_tokens=4, temperature=0, echo=True)
    assert isinstance(echoed, dict)
    assert START in echoed["choices"][0]["text"]
    assert echoed["choices"][0]["logprobs"] is None


def test_an_echo_has_the_log_probabilities_of_the_prompt(llm: LLM) -> None:
    tokens = llm.model.tokenize(START)
    n = len(tokens)
    with LlamaContext(llm.model, n_ctx=256) as ctx:
        rows = log_probabilities(ctx, tokens)
    for n_new in (0, 3):
        found = llm.create_completion(tokens, max_tokens=n_new, echo=True, logprobs=2)
        assert isinstance(found, dict)
        assert found["usage"]["prompt_tokens"] == n
        assert found["usage"]["completion_tokens"] == n_new
        (choice,) = found["choices"]
        shown = choice["logprobs"]
        assert "".join(shown["tokens"]) == choice["text"]
        assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
        assert [len(one) for one in shown.values()] == [n + n_new] * 4
        wanted = rows[np.arange(n - 1), tokens[1:]]
        np.testing.assert_allclose(shown["token_logprobs"][1:n], wanted, atol=1e-3)


@pytest.mark.parametrize("logprobs", [None, 1.5, True, -1, 1 << 30], ids=repr)
def test_wrong_logprobs_are_named_before_a_prompt_is_evaluated(llm: LLM, logprobs: Any) -> None:
    before = llm.context.tokens_evaluated
    with pytest.raises((TypeError, ValueError), match=r"^logprobs ") as caught:
        llm.create_completion(START + str(logprobs), echo=True, logprobs=logprobs)
    assert isinstance(caught.value, ValueError) == (logprobs in (-1, 1 << 30))
    assert llm.context.tokens_evaluated == before


def test_a_streamed_completion_is_the_same_text(llm: LLM) -> None:
    whole = llm.create_completion(START, max_tokens=12, temperature=0)
    chunks = list(llm.create_completion(START, max_tokens=12, temperature=0, stream=True))
    assert isinstance(whole, dict)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]


def test_a_chat_completion_has_the_members_that_clients_know(llm: LLM) -> None:
    found = llm.create_chat_completion(MESSAGES, max_tokens=8, temperature=0)
    assert isinstance(found, dict)
    assert found["object"] == "chat.completion"
    assert found["id"].startswith("chatcmpl-")
    assert set(found["usage"]) >= USAGE
    (choice,) = found["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"]["role"] == "assistant"
    text = choice["message"]["content"]
    chunks = list(llm.create_chat_completion(MESSAGES, max_tokens=8, temperature=0, stream=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert deltas[-1] == {}
    # As the loops of llama-cpp-python's users read it.
    assert "".join(delta["content"] for delta in deltas if "content" in delta) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_a_response_format_is_kept_to(llm: LLM) -> None:
    for given in (
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "kite", "schema": SCHEMA}},
    ):
        found = llm.create_chat_completion(
            MESSAGES,
            response_format=given,
            max_tokens=64,
            temperature=0,
            stages=list(writes(llm, '{"owner": "Lucy", "red": false}').stages or ()),
        )
        assert isinstance(found, dict)
        assert json.loads(found["choices"][0]["message"]["content"])["owner"] in ("Lucy", "Tom")
    with pytest.raises(ArgumentError):
        llm.create_chat_completion(MESSAGES, response_format={"type": "xml"})
    loose = {"type": "json_object", "schema": {"type": "number", "minimum": 0}}
    with pytest.raises(GrammarError, match="strict=False"):
        llm.create_chat_completion(MESSAGES, response_format=loose)
    found = llm.create_chat_completion(MESSAGES, response_format=loose, strict=False, max_tokens=4)
    assert isinstance(found, dict)


def test_options_that_only_llama_cpp_python_has_are_named(llm: LLM) -> None:
    with pytest.raises(TypeError, match="neither LLM nor LlamaContext has a parameter 'verbose'"):
        LLM(embedded_model_path(), verbose=False)
    with pytest.raises(
        TypeError, match="neither create_completion nor Sampler has a parameter 'suffix'"
    ):
        llm("One", suffix="x")
    with pytest.raises(
        TypeError, match="neither create_chat_completion nor Sampler has a parameter 'functions'"
    ):
        llm.create_chat_completion(MESSAGES, functions=[])


def test_embeddings_have_the_members_that_clients_know(llm: LLM) -> None:
    texts = ["a red kite", "a small bakery"]
    found = llm.create_embedding(texts)
    assert found["object"] == "list"
    assert set(found["usage"]) == {"prompt_tokens", "total_tokens"}
    assert found["usage"]["prompt_tokens"] == sum(len(llm.tokens_of(text)) for text in texts)
    assert [one["index"] for one in found["data"]] == [0, 1]
    assert {one["object"] for one in found["data"]} == {"embedding"}
    first = llm.create_embedding(texts[0])["data"][0]["embedding"]
    assert np.allclose(first, found["data"][0]["embedding"], atol=0.01)
    assert math.isclose(float(np.linalg.norm(first)), 1, abs_tol=1e-4)


# Life ---------------------------------------------------------------------------------------------


def test_a_given_model_stays_open(stories: LlamaModel) -> None:
    with LLM(stories, n_ctx=512) as llm:
        assert llm.model is stories
        assert llm.generate("One", max_tokens=1).finish_reason == "length"
    assert llm.is_closed
    assert not stories.is_closed
    for call in (
        lambda: llm.generate("One"),
        lambda: llm.chat(MESSAGES, template=TOOLS_TEMPLATE),
        lambda: llm.create_completion("One"),
    ):
        with pytest.raises(ClosedError):
            call()
    llm.close()


def test_what_fails_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError):
        LLM(tmp_path / "missing.gguf")
    for options in ({"n_parallel": 0}, {"n_ctx": -1}, {"namespace": 3}, {"secret": b"short"}):
        with pytest.raises((ValueError, TypeError)):
            LLM(embedded_model_path(), **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        LLM(embedded_model_path(), n_cxt=512)
    with (
        LlamaModel(embedded_model_path()) as model,
        pytest.raises(ArgumentError, match="this LlamaModel is already loaded"),
    ):
        LLM(model, n_gpu_layers=3)
    opened: list[LlamaContext] = []

    def fail(cache: PrefixCache) -> None:
        opened.append(cache.context)
        raise MemoryError

    monkeypatch.setattr("pykvcache.llm.BatchGenerator", fail)
    for given in (embedded_model_path(), LlamaModel(embedded_model_path())):
        with pytest.raises(MemoryError):
            LLM(given, n_ctx=512)
        ctx = opened.pop()
        assert ctx.is_closed
        assert ctx.model.is_closed == isinstance(given, str)


@pytest.mark.not_on_a_device(reason="layers on servers take no adapters")
def test_adapters_are_passed_on(model_folder: Path, tmp_path: Path) -> None:
    from support.adapters import write_adapter

    with LlamaModel(make_model("llama", model_folder)) as model:
        adapter = model.load_adapter(write_adapter(tmp_path / "one.gguf", "llama"))
        prompt = np.arange(20, 50, dtype=np.int32)
        with LLM(model, n_ctx=512) as plain, LLM(model, n_ctx=512, adapters=[adapter]) as other:
            a, b = (one.generate([prompt], max_tokens=8)[0] for one in (plain, other))
            assert a.tokens.tolist() != b.tokens.tolist()
            assert other.context.adapters == ((adapter, 1.0),)


def test_a_policy_of_your_own_chooses_the_victims() -> None:
    class Newest(ByPriority):
        def priority(self, component: Component) -> float:
            asked.append(component)
            return -component.start

    asked: list[Component] = []
    with LLM(embedded_model_path(), n_ctx=512, policy=Newest()) as llm:
        llm.generate("Lucy has a red kite.", max_tokens=2)
    assert asked
    with pytest.raises(ArgumentError, match="no policy 'best'"):
        LLM(embedded_model_path(), n_ctx=512, policy="best")


def test_layers_go_to_gpus_where_the_build_has_any(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[object]()

    class Spy(LlamaModel):
        def __init__(self, path: Any, *, n_gpu_layers: Any = None, **options: Any) -> None:
            given.append(n_gpu_layers)
            super().__init__(path, n_gpu_layers=0, **options)

    monkeypatch.setattr("pykvcache.llm.LlamaModel", Spy)
    for has_gpu in (False, True):
        monkeypatch.setattr("pykvcache._devices.takes_layers", lambda has_gpu=has_gpu: has_gpu)
        for more in ({}, {"n_gpu_layers": 3}):
            LLM(embedded_model_path(), n_ctx=256, **more).close()
    assert given == [0, 3, -1, 3]
