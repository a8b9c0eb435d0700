"""The templates that come with llama.cpp render to what transformers makes of them.

`chat_digests.json` holds digests of the texts that transformers made, for the conversations of
`support.conversations`; an empty one stands for an exception. With ``CHAT_DIGESTS=write`` in the
environment, and transformers installed, the file is written anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest

from support.conversations import CONVERSATIONS, NOW, TOKENS, Conversation

pytest.importorskip("jinja2")

from pykvcache.chat import render
from pykvcache.errors import ChatTemplateError

DIGESTS = Path(__file__).with_name("chat_digests.json")
TEMPLATES = Path(__file__).parents[2] / "vendor" / "llama.cpp" / "models" / "templates"
KNOWN = json.loads(DIGESTS.read_text(encoding="utf-8"))

needs_templates = pytest.mark.skipif(
    not TEMPLATES.is_dir(),
    reason="vendor/llama.cpp has no templates: python vendor/fetch.py --force",
)


class Clock(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        return NOW


@pytest.fixture(autouse=True)
def at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykvcache.chat.datetime", Clock)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def ours(template: str, one: Conversation) -> str:
    """Return our text; an empty one for an exception."""
    given = {"messages": one.messages, "tools": one.tools, "documents": one.documents}
    try:
        return render(template, given, {**TOKENS, **one.variables}, one.add_generation_prompt)
    except ChatTemplateError:
        return ""


def theirs(template: str, one: Conversation) -> str:
    """Return what transformers makes of it; an empty text for an exception."""
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


def test_the_digests_are_of_these_conversations() -> None:
    assert KNOWN["conversations"] == list(CONVERSATIONS)
    assert len(KNOWN["templates"]) == 70
    for _, *texts in KNOWN["templates"].values():
        assert len(texts) == len(CONVERSATIONS)
        assert any(texts), "a template that is never rendered proves nothing"


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
