"""Chat templates: text from a downloaded file, rendered in a sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from binding.kit import with_keys
from pykvcache import LlamaModel
from support.models import make_model

pytest.importorskip("jinja2")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "{% if m['role'] == 'system' and not loop.first %}\n"
    "{{ raise_exception('system comes first') }}\n"
    "{% endif %}\n"
    "[{{ m.role }}]{{ m['content'] | trim }}{{ eos_token }}{% endfor %}\n"
    "{% if add_generation_prompt %}\n[assistant]{% endif %}"
)
MESSAGES = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Ho"}]


def test_messages_are_rendered_with_the_tokens_of_the_model(model: Any) -> None:
    text = model("llama").apply_chat_template(MESSAGES, template=TEMPLATE)
    assert text == "<s>[user]Hi</s>[assistant]Ho</s>[assistant]"
    text = model("llama").apply_chat_template(
        MESSAGES, template=TEMPLATE, add_generation_prompt=False
    )
    assert text == "<s>[user]Hi</s>[assistant]Ho</s>"


def test_tokens_that_a_model_lacks_are_empty(model: Any) -> None:
    assert model("llama_test").apply_chat_template([], template="<{{ bos_token }}>") == "<>"


def test_a_model_renders_its_own_template(model_folder: Path, tmp_path: Path) -> None:
    path = with_keys(
        make_model("llama", model_folder),
        tmp_path / "chat.gguf",
        {"tokenizer.chat_template": TEMPLATE},
    )
    with LlamaModel(path) as one:
        assert one.chat_template == TEMPLATE
        assert one.apply_chat_template(MESSAGES[:1]) == "<s>[user]Hi</s>[assistant]"
        assert one.apply_chat_template(MESSAGES, template="other") == "other"


def test_without_a_template_there_is_nothing_to_render(model: Any) -> None:
    assert model("llama").chat_template is None
    with pytest.raises(ValueError, match="no chat template"):
        model("llama").apply_chat_template(MESSAGES)


def test_a_message_without_a_role_is_refused(model: Any) -> None:
    """A template leaves it out without a word, and the answer is to nothing."""
    for wrong in ({"rol": "user", "content": "Hi"}, {}, {"role": None, "content": "Hi"}):
        with pytest.raises(ValueError, match=r"messages\[2\] has no 'role': its keys are"):
            model("llama").apply_chat_template([*MESSAGES, wrong], template=TEMPLATE)
    with pytest.raises(TypeError, match=r"'role' of messages\[0\] must be a str, not int"):
        model("llama").apply_chat_template([{"role": 1}], template=TEMPLATE)
    for wrong in ("Hi", ["Hi"], [None], None, {"role": "user"}):
        with pytest.raises(TypeError, match="sequence of mappings with 'role'"):
            model("llama").apply_chat_template(wrong, template=TEMPLATE)


def test_a_template_may_refuse_the_messages(model: Any) -> None:
    messages = [*MESSAGES, {"role": "system", "content": ""}]
    with pytest.raises(ValueError, match="system comes first"):
        model("llama").apply_chat_template(messages, template=TEMPLATE)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ namespace().__init__.__globals__ }}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
        "{{ open('/etc/passwd') }}",
        "{{ self.__init__() }}",
        "{{ ''.join.__self__.__class__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ ('%s' | format(1)).__class__ }}",
    ],
)
def test_a_hostile_template_gets_out_nothing(model: Any, template: str) -> None:
    messages = [dict(m) for m in MESSAGES]
    try:
        text = model("llama").apply_chat_template(messages, template=template)
    except ValueError:
        text = ""
    assert "class" not in text
    assert "globals" not in text
    assert messages == MESSAGES


@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{{ messages[99].role.x }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(10 ** 9) %}a{% endfor %}",
        "{{ 'a' + 1 }}",
        "{{ 'x' | nosuchfilter }}",
        "{{ raise_exception() }}",
    ],
)
def test_a_broken_template_is_a_value_error(model: Any, template: str) -> None:
    with pytest.raises(ValueError, match="template"):
        model("llama").apply_chat_template(MESSAGES, template=template)


@pytest.mark.parametrize(
    ("messages", "template"),
    [(None, "x"), (5, "x"), (MESSAGES, 5), (MESSAGES, b"x"), (MESSAGES, ["x"])],
)
def test_wrong_types_are_type_errors(model: Any, messages: Any, template: Any) -> None:
    with pytest.raises(TypeError):
        model("llama").apply_chat_template(messages, template=template)


def test_unicode_and_percent_signs_pass_through(model: Any) -> None:
    messages = [{"role": "user", "content": "100% {{ 7 * 7 }} {% raw %} é漢😀 \0"}]
    text = model("llama").apply_chat_template(messages, template="{{ messages[0].content }}")
    assert text == messages[0]["content"]
