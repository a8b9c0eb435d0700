"""Chat templates: text from a downloaded file, rendered in a sandbox, as transformers does.

`chat_digests.json` holds digests of the texts that transformers made, for the conversations of
`support.conversations`; an empty one stands for an exception. With ``CHAT_DIGESTS=write`` in the
environment, and transformers installed, the file is written anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from datetime import datetime, tzinfo
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from pykvcache import LlamaModel
from pykvcache.errors import ArgumentError, ChatTemplateError
from support.chat_formats import needs_templates, source
from support.children import child
from support.conversations import CONVERSATIONS, NOW, TOKENS, Conversation
from support.models import make_model, with_keys

pytest.importorskip("jinja2")

from pykvcache.chat import render

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


NO_CONTENT = r"messages\[2\] has neither 'content' nor 'tool_calls': its keys are 'role'"
NO_ROLE = r"messages\[2\] has no 'role': its keys are"
REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    # Most templates render these to an empty turn, and the answer is to nothing.
    *(
        ([*MESSAGES, wrong], TEMPLATE, ArgumentError, NO_ROLE)
        for wrong in ({"rol": "user", "content": "Hi"}, {}, {"role": None, "content": "Hi"})
    ),
    *(
        ([*MESSAGES, {"role": "user", **wrong}], TEMPLATE, ArgumentError, NO_CONTENT + more)
        for wrong, more in (
            ({"text": "hi"}, ", 'text'$"),
            ({"contents": "hi"}, ""),
            ({"content": None, "tool_calls": None}, ""),
        )
    ),
    ([{"role": 1}], TEMPLATE, TypeError, r"'role' of messages\[0\] must be a str, not int"),
    *(
        (wrong, TEMPLATE, TypeError, "sequence of mappings with 'role'")
        for wrong in ("Hi", ["Hi"], [None], None, {"role": "user"})
    ),
    *((MESSAGES, wrong, TypeError, "template must be text") for wrong in (5, b"x", ["x"])),
    (MESSAGES, None, ArgumentError, "no chat template"),
    *(
        (MESSAGES, template, ChatTemplateError, "template")
        for template in (
            "{% for",
            "{{ 1 / 0 }}",
            "{{ nothing.at.all }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{% for i in range(10 ** 9) %}a{% endfor %}",
            "{{ 'x' | nosuchfilter }}",
        )
    ),
]


@pytest.mark.parametrize(("messages", "template", "error", "said"), REFUSED)
def test_messages_and_templates_that_say_nothing_are_refused(
    model: Any, messages: Any, template: Any, error: type[Exception], said: str
) -> None:
    assert model("llama").chat_template is None
    with pytest.raises(error, match=said) as caught:
        model("llama").apply_chat_template(messages, template=template)
    if said.startswith("messages"):
        assert caught.value.what == "messages[2]"  # type: ignore[attr-defined]


def test_a_template_may_refuse_the_messages(model: Any) -> None:
    messages = [*MESSAGES, {"role": "system", "content": ""}]
    with pytest.raises(ChatTemplateError, match="system comes first") as caught:
        model("llama").apply_chat_template(messages, template=TEMPLATE)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.reason, str(error)) == ("refused", str(caught.value))


@pytest.mark.hazard("N35")
@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__}'.format(1) }}",
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


SPECIAL = [{"role": "user", "content": "Größe <b>&amp;</b> 漢 'x'"}]


@pytest.fixture
def text(model: Any) -> Any:

    def rendered(template: str, messages: Any = SPECIAL, **more: Any) -> str:
        made: str = model("llama").apply_chat_template(messages, template=template, **more)
        return made

    return rendered


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        (
            "{% for i in range(4) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
            "013",
        ),
        ("{% generation %}a{{ 1 + 1 }}{% endgeneration %}b", "a2b"),
        ("{% for i in [1, 2] %}{%- generation -%} {{ i }} {%- endgeneration -%}{% endfor %}", "12"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Größe <b>&amp;</b> 漢 \'x\'"}]'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ {'b': 1, 'a': [2]} | tojson(sort_keys=true) }}", '{"a": [2], "b": 1}'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':')) }}", '{"b":1,"a":2}'),
        ("{{ {'b': [1]} | tojson(indent=1) }}", '{\n "b": [\n  1\n ]\n}'),
        ("  {% if true %}\n  x\n  {% endif %}\ny\n", "  x\ny"),
        ("{{ tools is none }}{{ documents is none }}{{ tools is defined }}", "TrueTrueTrue"),
    ],
)  # fmt: skip
def test_renders_as_in_transformers(text: Any, template: str, expected: str) -> None:
    assert text(template) == expected


def test_tools_documents_and_variables_are_passed(text: Any) -> None:
    template = "{{ tools[0].name }}{{ documents[0].title }}{{ enable_thinking }}{{ bos_token }}"
    made = text(
        template,
        tools=[MappingProxyType({"name": "clock"})],
        documents=({"title": "Kites"},),
        enable_thinking=False,
        bos_token="<b>",
    )
    assert made == "clockKitesFalse<b>"


def test_keys_without_a_value_are_missing_in_messages(text: Any) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": None}]}]
    template = "{{ messages[0].content is defined }}{{ messages[0].tool_calls[0].id is none }}"
    assert text(template, messages) == "FalseTrue"
    template = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert text(template, [{"role": "assistant", name: "Hm."}]) == "Hm.Hm."


class Role(str, Enum):
    USER = "user"


def test_values_of_other_types_become_plain_ones(text: Any) -> None:
    messages = [{"role": Role.USER, "content": np.str_("a"), "n": np.int64(3), "ok": np.True_}]
    shown = "[{'role': 'user', 'content': 'a', 'n': 3, 'ok': True}]"
    assert text("{{ messages }}", messages) == shown


def test_only_plain_data_is_rendered(text: Any) -> None:
    for more in ({"tools": [len]}, {"tools": {"a": 1}}, {"documents": "x"}, {"x": object()}):
        with pytest.raises(TypeError, match=r"must be a sequence of mappings|plain data"):
            text("x", **more)
    inside: list[Any] = []
    inside.append(inside)
    with pytest.raises(ArgumentError, match="nested deeper than 100"):
        text("x", [{"role": "user", "content": inside}])


def test_without_jinja2_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['jinja2'] = None\n"
        "from pykvcache import LlamaModel, embedded_model_path\n"
        "model = LlamaModel(embedded_model_path(), vocab_only=True)\n"
        "try: model.apply_chat_template([{'role': 'user', 'content': 'Hi'}])\n"
        "except ImportError as error: print(error)"
    )
    done = child(code)
    assert done.returncode == 0, done.stderr
    assert "pip install '.[chat]'" in done.stdout


DIGESTS = Path(__file__).with_name("chat_digests.json")
KNOWN = json.loads(DIGESTS.read_text(encoding="utf-8"))


class Clock(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        return NOW


@pytest.fixture(autouse=True)
def at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykvcache.chat.datetime", Clock)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def ours(template: str, one: Conversation) -> str:
    given = {"messages": one.messages, "tools": one.tools, "documents": one.documents}
    try:
        return render(template, given, {**TOKENS, **one.variables}, one.add_generation_prompt)
    except ChatTemplateError:
        return ""


def theirs(template: str, one: Conversation) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    # As apply_chat_template of a tokenizer does, which needs a tokenizer.
    messages = [{k: v for k, v in m.items() if v is not None} for m in one.messages]
    try:
        texts, _ = render_jinja_template(
            [messages],
            tools=one.tools,
            documents=one.documents,
            chat_template=template,
            add_generation_prompt=one.add_generation_prompt,
            **{**TOKENS, **one.variables},
        )
    except Exception:
        return ""
    return str(texts[0])


@pytest.mark.hazard("N36")
@needs_templates
@pytest.mark.parametrize("name", KNOWN["templates"])
def test_texts_are_those_of_transformers(name: str) -> None:
    template = source(name)
    of_template, *texts = KNOWN["templates"][name]
    assert hashlib.sha256(template.encode()).hexdigest() == of_template, "another llama.cpp"
    for (what, one), known in zip(CONVERSATIONS.items(), texts, strict=True):
        text = ours(template, one)
        assert (digest(text) if text else "") == known, what


@needs_templates
def test_transformers_itself_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    found = {}
    for name in KNOWN["templates"]:
        texts = [theirs(source(name), one) for one in CONVERSATIONS.values()]
        assert texts == [ours(source(name), one) for one in CONVERSATIONS.values()], name
        of_template = hashlib.sha256(source(name).encode()).hexdigest()
        found[name] = [of_template, *(digest(text) if text else "" for text in texts)]
    if os.environ.get("CHAT_DIGESTS") == "write":
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in found.items())
        DIGESTS.write_text(
            f'{{\n "transformers": "{transformers.__version__}",\n'
            f' "conversations": {json.dumps(list(CONVERSATIONS))},\n'
            f' "templates": {{\n{rows}\n }}\n}}\n',
            encoding="utf-8",
        )
    else:
        assert found == KNOWN["templates"]
