"""The anthropic package as a strict client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve.conftest import MESSAGES

SYSTEM = "This is a story about Lucy and Tom, who live by the sea. Ben works at the mill. "


@pytest.fixture(scope="module")
def client(address: str, anthropic: Any) -> Any:
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as found:
        yield found


def test_a_message_is_answered(client: Any) -> None:
    answer = client.messages.create(model="stories", max_tokens=8, messages=MESSAGES)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 8
    counted = client.messages.count_tokens(model="stories", messages=MESSAGES)
    usage = answer.usage
    assert counted.input_tokens == (
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    )


def test_a_stream_builds_the_whole_message(client: Any) -> None:
    with client.messages.stream(model="stories", max_tokens=12, messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text
    assert final.usage.output_tokens == 12


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_an_output_format_constrains_the_answer(client: Any, where: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}}
    form = {"type": "json_schema", "schema": {**schema, "required": ["n"]}}
    answer = client.messages.create(
        model="m",
        max_tokens=200,  # white space counts, too
        messages=[{"role": "user", "content": "How many?"}],
        extra_body={"temperature": 0, where: {"format": form} if "config" in where else form},
    )
    assert json.loads(answer.content[0].text)["n"] <= 9


def test_the_stop_sequence_that_ended_a_message_is_reported(client: Any) -> None:
    options = {"model": "stories", "max_tokens": 40, "messages": MESSAGES}
    options["extra_body"] = {"temperature": 0}
    text = client.messages.create(**options).content[0].text
    answer = client.messages.create(**options, stop_sequences=[text[5:9]])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", text[5:9])


def test_cache_control_keeps_a_prefix_and_reports_it(client: Any) -> None:
    system = [
        {"type": "text", "text": SYSTEM * 8, "cache_control": {"type": "ephemeral", "ttl": "5m"}}
    ]
    first = client.messages.create(model="stories", max_tokens=1, system=system, messages=MESSAGES)
    assert first.usage.cache_creation_input_tokens > 50
    other = [{"role": "user", "content": "Where is Ben?"}]
    second = client.messages.create(model="stories", max_tokens=1, system=system, messages=other)
    assert second.usage.cache_read_input_tokens >= first.usage.cache_creation_input_tokens - 1


def test_diagnostics_say_what_changed(client: Any) -> None:
    def ask(previous: str | None, **changed: Any) -> Any:
        options = {"system": SYSTEM * 4, "messages": MESSAGES, **changed}
        return client.messages.create(
            model="stories", max_tokens=4, diagnostics={"previous_message_id": previous}, **options
        )

    first = ask(None)
    assert first.diagnostics is None
    longer = [*MESSAGES, {"role": "assistant", "content": first.content[0].text}, *MESSAGES]
    assert ask(first.id, messages=longer).diagnostics is None
    reason = ask(first.id, system="Something else. " * 20).diagnostics.cache_miss_reason
    assert reason.type == "system_changed"
    assert reason.cache_missed_input_tokens > 20
    changed = [{"role": "user", "content": "Ben has a boat, and Lucy a very old hat."}, *longer[1:]]
    assert ask(first.id, messages=changed).diagnostics.cache_miss_reason.type == "messages_changed"
    reason = ask("msg_unknown").diagnostics.cache_miss_reason
    assert reason.type == "previous_message_not_found"


def test_models_are_listed_in_anthropics_form(client: Any) -> None:
    page = client.models.list()
    (model,) = page.data
    assert (model.id, model.type, model.display_name) == ("stories", "model", "stories")
    assert model.created_at.year >= 2024
    assert (page.first_id, page.last_id, page.has_next_page()) == ("stories", "stories", False)


def test_errors_are_anthropics_error_objects(client: Any, anthropic: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="stories", max_tokens=4, messages=[])
    assert caught.value.body["error"]["type"] == "invalid_request_error"
