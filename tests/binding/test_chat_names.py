"""What transformers gives to chat templates beyond Jinja, and how it passes what it was given."""

from __future__ import annotations

import re
from datetime import datetime
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from pykvcache.errors import ChatTemplateError

pytest.importorskip("jinja2")

MESSAGES = [{"role": "user", "content": "Größe <b>&amp;</b> 漢 'x'"}]


@pytest.fixture
def text(model: Any) -> Any:
    """``text(template, ...)``: what a template renders to."""

    def rendered(template: str, messages: Any = MESSAGES, **more: Any) -> str:
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
        ("{{ {'b': 1} | tojson(indent='--') }}", '{\n--"b": 1\n}'),
        ("  {% if true %}\n  x\n  {% endif %}\ny\n", "  x\ny"),
        ("{{ tools is none }}{{ documents is none }}{{ tools is defined }}", "TrueTrueTrue"),
        ("{{ 1 < 2 < 3 }}{{ 3 > 2 > 2 }}{{ 1 < 0 < x.y }}", "TrueFalseFalse"),
        ("{{ [1, 2, 3][1:] }}{{ 'abcd'[::-2] }}{{ 'abc'[-1] }}", "[2, 3]dbc"),
        ("{{ 'a' ~ 1 ~ none ~ [x, true] }}", "a1None[Undefined, True]"),
        ("{{ [3, 1, 2] | sort | join(', ') }}{{ range(4) | sum }}", "1, 2, 36"),
        ("{{ none | selectattr('x') | list }}{{ none | map('upper') | list }}", "[][]"),
        ("{{ 'yes' if [] | select else 'no' }}", "yes"),
        ("{{ '%s is %05.1f' % ('x', 2) }}{{ '%s' | format('y') }}", "x is 002.0y"),
        ("{{ '{:>4}{a!r}'.format(1, a='b') }}{{ '{x}'.format_map({'x': 2}) }}", "   1'b'2"),
        ("{{ '<' | safe + '<' }}{{ '<' | e }}{{ '<' }}", "<&lt;&lt;<"),
        ("{{ 3 is odd }}{{ 4 is divisibleby 2 }}{{ 2 in [1, 2] }}", "TrueTrueTrue"),
        ("{{ 'a-b-c'.split('-', 1) }}{{ ', '.join(['a', 'b']) }}", "['a', 'b-c']a, b"),
        ("{{ {'a': 1}.get('b', 5) }}{{ {(1, 2): 3}[(1, 2)] }}", "53"),
        ("{% set ns = namespace(a=1) %}{% for i in [1, 2] %}{% set ns.a = ns.a + i %}{% endfor %}"
         "{{ ns.a }}", "4"),
        ("{% macro f(x) %}[{{ x }}{{ caller() if caller else '' }}]{% endmacro %}"
         "{{ f(1) }}{% call f(2) %}!{% endcall %}", "[1][2!]"),
        ("{% for a in [[1, [2]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}",
         "12"),
        ("{{ ['ab', 1] | map('length') | first }}{{ 1 in ([1, 'a'] | select('gt', 0)) }}", "2True"),
        ("{{ [1, 2, 3, 'a'] | map('abs') | batch(2) | first }}{{ 'x' if 3 | slice(2) }}",
         "[1, 2]x"),
        ("{{ dict.fromkeys([1, 2]) }}{{ dict.fromkeys('ab', 0) }}",
         "{1: None, 2: None}{'a': 0, 'b': 0}"),
        ("{{ 7 // 2 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 7 % 4 }}{{ [0] * 2 }}", "310240.53[0, 0]"),
    ],
)  # fmt: skip
def test_renders_as_in_transformers(text: Any, template: str, expected: str) -> None:
    assert text(template) == expected


@pytest.mark.parametrize("read", ["list", "length", "last", "join", "map('abs') | list"])
def test_what_fails_in_a_list_fails_where_it_is_read(text: Any, read: str) -> None:
    """A template that never gets there is rendered, as by generators."""
    assert text("{% for i in [-1, 'a'] | map('abs') %}{{ i }}{% break %}{% endfor %}") == "1"
    with pytest.raises(ChatTemplateError, match="TypeError"):
        text("{{ [-1, 'a'] | map('abs') | " + read + " }}")


def test_the_date_is_that_of_the_clock(text: Any) -> None:
    before = datetime.now().replace(microsecond=0)
    found = datetime.strptime(text("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}"), "%Y-%m-%d %H:%M:%S")
    assert before <= found <= datetime.now()


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


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_found_under_the_names_that_templates_read(text: Any, name: str) -> None:
    template = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    assert text(template, [{"role": "assistant", name: "Hm."}]) == "Hm.Hm."


def test_tokens_that_a_model_lacks_are_not_defined(model: Any) -> None:
    made = model("llama_test").apply_chat_template([], template="{{ bos_token is defined }}")
    assert made == "False"


class Role(str, Enum):
    USER = "user"


def test_values_of_other_types_become_plain_ones(text: Any) -> None:
    messages = [{"role": Role.USER, "n": np.int64(3), "x": np.float32(0.5), "ok": np.True_}]
    assert text("{{ messages }}", messages) == "[{'role': 'user', 'n': 3, 'x': 0.5, 'ok': True}]"


@pytest.mark.parametrize(
    "more", [{"tools": [len]}, {"tools": {"a": 1}}, {"documents": "x"}, {"x": object()}, {"x": b""}]
)
def test_what_is_not_plain_data_is_refused(text: Any, more: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"must be a sequence of mappings|plain data"):
        text("x", **more)


def test_values_without_an_end_are_refused(text: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykvcache._chat.MAX_VALUES", 20_000)
    inside: list[Any] = []
    inside.append(inside)
    with pytest.raises(ValueError, match="nested deeper than 90"):
        text("x", [{"role": "user", "content": inside}])
    wide: Any = "x"
    for _ in range(60):
        wide = [wide, wide]
    with pytest.raises(ValueError, match="more than 20000 values"):
        text("x", [{"role": "user", "content": wide}])


def test_an_error_says_of_which_kind_it_is(text: Any) -> None:
    for template, reason in {
        "{{ raise_exception('no') }}": "refused",
        "{{ x.y }}": "error",
    }.items():
        with pytest.raises(ChatTemplateError) as caught:
            text(template)
        assert (caught.value.reason, caught.value.limit) == (reason, None)
    with pytest.raises(ChatTemplateError, match=re.escape("16384 bits")) as caught:
        text("{{ 10 ** (10 ** 9) }}")
    assert (caught.value.reason, caught.value.limit) == ("limit", 16384)
