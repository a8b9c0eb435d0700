"""The openai package as a strict client."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

from pykvcache import LlamaContext, LlamaModel, embedded_model_path
from support.logprobs import log_probabilities

PROMPT = [{"role": "user", "content": "Lucy has a red kite. Tom is a baker."}]


@pytest.fixture(scope="module")
def client(address: str, openai: Any) -> Any:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_a_repeated_prompt_is_cached_but_for_its_last_token(client: Any) -> None:
    messages = [{"role": "user", "content": "Ben goes to the mill with a brown dog."}]
    first, second = (
        client.chat.completions.create(model="stories", messages=messages, max_tokens=1).usage
        for _ in range(2)
    )
    assert first.prompt_tokens_details.cache_write_tokens > 1
    assert second.prompt_tokens_details.cached_tokens == second.prompt_tokens - 1


def test_a_stream_with_logprobs_has_the_text_of_its_tokens(client: Any) -> None:
    options = {"model": "stories", "prompt": ["Lucy has", "Tom is"], "max_tokens": 24, "n": 3}
    whole = client.completions.create(**options, temperature=0, logprobs=1)
    texts, tokens = [""] * 6, [""] * 6
    for chunk in client.completions.create(**options, temperature=0, logprobs=1, stream=True):
        (choice,) = chunk.choices
        if choice.logprobs is not None:
            assert choice.logprobs.text_offset[0] == len(texts[choice.index])
            tokens[choice.index] += "".join(choice.logprobs.tokens)
        texts[choice.index] += choice.text
    assert texts == tokens == [choice.text for choice in whole.choices]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_has_the_text_of_the_whole_answer(client: Any, n: int) -> None:
    options = {"model": "stories", "messages": PROMPT, "max_tokens": 12, "seed": 7, "n": n}
    client.chat.completions.create(**options)  # both below reuse its prefix, and round alike
    whole = client.chat.completions.create(**options)
    texts, reasons = [""] * n, [None] * n
    usage = None
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length"] * n
    assert usage.completion_tokens == 12 * n


def test_an_unlimited_answer_ends_at_the_trained_length(client: Any) -> None:
    story = [{"role": "user", "content": "Once upon a time " * 240}]
    answer = client.chat.completions.create(model="stories", messages=story, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 1024


def test_stop_strings_end_the_answer_before_them(client: Any) -> None:
    options = {"model": "stories", "messages": PROMPT, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content
    answer = client.chat.completions.create(**options, stop=[whole[5:9]]).choices[0]
    assert answer.message.content == whole[: whole.index(whole[5:9])]
    assert answer.finish_reason == "stop"


def test_logprobs_add_up_to_the_text(client: Any) -> None:
    answer = client.chat.completions.create(
        model="stories", messages=PROMPT, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    assert "refusal" in answer.message.model_fields_set & answer.logprobs.model_fields_set
    content = answer.logprobs.content
    assert "".join(bytes(one.bytes).decode() for one in content) == answer.message.content
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.logprob == max(top.logprob for top in one.top_logprobs) <= 0


def test_a_completion_shows_the_chosen_and_the_likeliest_tokens_asked_for(client: Any) -> None:
    for n in (0, 1, 3):
        choice = client.completions.create(
            model="stories", prompt="Lucy has", max_tokens=4, seed=1, logprobs=n
        ).choices[0]
        assert "".join(choice.logprobs.tokens) == choice.text
        for token, value, top in zip(
            choice.logprobs.tokens,
            choice.logprobs.token_logprobs,
            choice.logprobs.top_logprobs,
            strict=True,
        ):
            assert top[token] == value
            assert max(n, 1) <= len(top) <= n + 1


def test_a_biased_token_is_never_chosen(client: Any, address: str) -> None:
    options = {"model": "stories", "messages": PROMPT, "max_tokens": 20, "temperature": 0}
    text = client.chat.completions.create(**options).choices[0].message.content
    url = address + "/tokenize"
    with urlopen(url, json.dumps({"content": text}).encode(), timeout=60) as answer:
        tokens = json.load(answer)["tokens"]
    biased = client.chat.completions.create(**options, logit_bias={str(tokens[0]): -100})
    assert biased.choices[0].message.content != text


def test_completions_take_texts_and_tokens(client: Any) -> None:
    one = client.completions.create(model="stories", prompt="Lucy has", max_tokens=4, temperature=0)
    two = client.completions.create(
        model="stories", prompt=["Lucy has", "Tom is"], max_tokens=4, temperature=0, echo=True
    )
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text == "Lucy has" + one.choices[0].text
    assert two.usage.completion_tokens == 8
    stream = client.completions.create(
        model="stories", prompt="Lucy has", max_tokens=4, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == one.choices[0].text


def test_n_probs_is_the_number_of_likeliest_tokens_of_a_completion(client: Any) -> None:
    options = {"model": "stories", "prompt": "Lucy has", "max_tokens": 4, "temperature": 0}
    shown = client.completions.create(**options, logprobs=3).choices[0].logprobs
    found = client.completions.create(**options, extra_body={"n_probs": 3}).choices[0].logprobs
    assert [list(row) for row in found.top_logprobs] == [list(row) for row in shown.top_logprobs]
    assert all(len(row) >= 3 for row in found.top_logprobs)


def test_an_echo_has_the_log_probabilities_of_the_prompt(client: Any) -> None:
    texts = ["Lucy has a red kite. Tom is a baker.", "Tom likes the mill.", "Ben"]
    with LlamaModel(embedded_model_path()) as model:
        prompts = [model.tokenize(text) for text in texts]
        rows = []
        for prompt in prompts:
            with LlamaContext(model, n_ctx=256) as ctx:
                rows.append(log_probabilities(ctx, prompt))
        likeliest = [
            [model.token_to_piece(int(t)).decode() for t in row.argmax(axis=1)] for row in rows
        ]
    options = {"model": "stories", "temperature": 0, "echo": True, "logprobs": 1}
    given: Any
    for given in ([prompt.tolist() for prompt in prompts], texts):
        for n_new in (0, 2):
            found = client.completions.create(**options, prompt=given, max_tokens=n_new)
            assert found.usage.prompt_tokens == sum(map(len, prompts))
            assert found.usage.completion_tokens == 3 * n_new
            assert found.usage.prompt_tokens_details.cached_tokens == 0
            for choice, prompt, row, best in zip(
                found.choices, prompts, rows, likeliest, strict=True
            ):
                shown, n = choice.logprobs, len(prompt)
                assert "".join(shown.tokens) == choice.text
                assert choice.text.startswith(texts[choice.index])
                for i, (token, at) in enumerate(zip(shown.tokens, shown.text_offset, strict=True)):
                    assert choice.text[at:].startswith(token), i
                assert len(shown.tokens) == n + n_new
                assert shown.token_logprobs[0] is shown.top_logprobs[0] is None
                wanted = row[np.arange(n - 1), prompt[1:]]
                np.testing.assert_allclose(shown.token_logprobs[1:n], wanted, atol=1e-3)
                for i in range(n - 1):
                    top = shown.top_logprobs[i + 1]
                    assert top[best[i]] == pytest.approx(row[i].max(), abs=1e-3)
                    assert top[shown.tokens[i + 1]] == shown.token_logprobs[i + 1]
                if n_new:
                    new = shown.tokens[n]
                    assert new == best[-1]
                    assert shown.token_logprobs[n] == pytest.approx(row[-1].max(), abs=1e-3)


def test_a_streamed_echo_begins_with_the_prompts_log_probabilities(client: Any) -> None:
    options = {"model": "stories", "prompt": ["Lucy has", "Tom is"], "n": 2, "max_tokens": 3}
    options.update(temperature=0, echo=True, logprobs=2)
    whole = client.completions.create(**options)
    texts, lists = [""] * 4, [([], [], [], []) for _ in range(4)]
    for chunk in client.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if (new := choice.logprobs) is not None:
            parts = new.tokens, new.token_logprobs, new.top_logprobs, new.text_offset
            for known, part in zip(lists[choice.index], parts, strict=True):
                known += part
    assert texts == [choice.text for choice in whole.choices]
    for (tokens, values, tops, offsets), choice in zip(lists, whole.choices, strict=True):
        assert tokens == choice.logprobs.tokens
        assert offsets == choice.logprobs.text_offset
        assert values[0] is tops[0] is None
        np.testing.assert_allclose(values[1:], choice.logprobs.token_logprobs[1:], atol=1e-3)


def test_embeddings_have_unit_length_in_both_encodings(client: Any) -> None:
    texts = ["Lucy has a kite.", "Tom is a baker."]
    floats = client.embeddings.create(model="stories", input=texts, encoding_format="float").data
    packed = client.embeddings.create(model="stories", input=texts, encoding_format="base64").data
    rows = np.array([one.embedding for one in floats], np.float32)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    for row, one in zip(rows, packed, strict=True):
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(one.embedding), "<f4"), row)


def test_models_are_listed(client: Any, openai: Any) -> None:
    assert [model.id for model in client.models.list()] == ["stories"]
    assert client.models.retrieve("stories").id == "stories"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_response_continues_a_stored_one(client: Any, openai: Any) -> None:
    first = client.responses.create(
        model="stories", input="Lucy has a red kite.", max_output_tokens=8
    )
    assert first.status == "incomplete"
    assert first.output_text
    second = client.responses.create(
        model="stories", input="And Tom?", previous_response_id=first.id, max_output_tokens=8
    )
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="stories", input="x", previous_response_id=first.id)


def test_a_streamed_response_ends_with_the_whole_response(client: Any) -> None:
    stream = client.responses.create(
        model="stories", input="Lucy has a kite.", max_output_tokens=8, stream=True
    )
    events = list(stream)
    text = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == text


def test_an_answer_says_how_it_was_sampled(client: Any) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    found = client.responses.create(
        model="stories", input="Hi", max_output_tokens=1, top_p=0.5, tools=[tool]
    )
    assert (found.top_p, found.temperature) == (0.5, 0.8)
    assert (found.presence_penalty, found.frequency_penalty, found.top_logprobs) == (0, 0, 0)
    assert (found.text.format.type, found.reasoning.effort) == ("text", None)
    assert found.tools[0].to_dict() == {**tool, "description": None, "strict": None}


def test_what_is_cut_off_is_incomplete(client: Any) -> None:
    events = list(
        client.responses.create(model="stories", input="Hi", max_output_tokens=2, stream=True)
    )
    done = [one.item for one in events if one.type == "response.output_item.done"]
    assert [one.status for one in done] == ["incomplete"]
    assert [one.status for one in events[-1].response.output] == ["incomplete"]


def test_an_error_in_a_stream_of_a_response_is_its_last_event(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr("pykvcache.serve.responses._ResponseWriter.finish", broken)
    body = {"input": "Hi", "max_output_tokens": 1, "stream": True}
    lines = client.post("/responses", body=body, cast_to=str).split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    last = events[-1]
    assert (last["type"], last["sequence_number"]) == ("error", len(events) - 1)
    assert "no more" in last["message"]
    assert set(last) >= {"code", "param", "error"}


def test_a_response_has_the_log_probabilities_of_its_text(client: Any) -> None:
    options = {"model": "stories", "input": "Lucy has a kite.", "max_output_tokens": 8}
    asked = {**options, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = list(client.responses.create(**asked, stream=True))
    (part,) = events[-1].response.output[0].content
    assert "".join(bytes(one.bytes).decode() for one in part.logprobs) == part.text
    assert {len(one.top_logprobs) for one in part.logprobs} == {2}
    streamed = [
        one.token
        for event in events
        if event.type == "response.output_text.delta"
        for one in event.logprobs
    ]
    assert streamed == [one.token for one in part.logprobs]
    (plain,) = client.responses.create(**options).output[0].content
    assert plain.logprobs == []


def test_many_clients_get_the_texts_that_one_gets(address: str, openai: Any) -> None:
    prompts = ["Lucy has", "Tom is", "One day", "The dog"] * 8

    async def ask(client: Any, prompt: str) -> str:
        answer = await client.completions.create(
            model="stories", prompt=prompt, max_tokens=16, temperature=0
        )
        return str(answer.choices[0].text)

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    texts = asyncio.run(run())
    assert texts == texts[:4] * 8
    assert len(set(texts)) > 1
