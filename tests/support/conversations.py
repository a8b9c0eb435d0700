"""Conversations that chat templates are rendered on, with everything that templates look at."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

__all__ = ["CONVERSATIONS", "NOW", "TOKENS", "Conversation"]

NOW = datetime(2024, 2, 29, 13, 5, 7)
"""What the clock says when a template asks for the date."""

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


class Conversation(NamedTuple):
    """Arguments of ``apply_chat_template``."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    variables: dict[str, Any] = {}  # noqa: RUF012 - never changed


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "You are a baker. Answer in one sentence."}
SHORT = [user("Who lives by the river?")]
LONG = [
    SYSTEM,
    user("  Who lives by the river?\n"),
    assistant("Lucy does. "),
    user("<b>And</b> \"Tom\" & 'Mara'?  Größe 漢字 😀 \u2028"),
    assistant("Tom is a baker;\n\n    Mara likes pancakes.\t"),
    user("Thanks {{ 7 * 7 }} {% raw %}"),
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Tells the weather, as in "Köln" & <elsewhere>.',
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A town"},
                "unit": {"type": "string", "enum": ["°C", "°F"], "default": "°C"},
                "days": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                "at": {
                    "type": "object",
                    "properties": {"lat": {"type": "number"}, "lon": {"type": ["number", "null"]}},
                    "required": ["lat"],
                },
            },
            "required": ["place"],
        },
        "return": {"type": "string"},
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def call(arguments: Any, name: str = "get_weather", at: str = "call00001") -> dict[str, Any]:
    return {"type": "function", "id": at, "function": {"name": name, "arguments": arguments}}


def answer(content: Any, at: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "name": "get_weather", "tool_call_id": at, "content": content}


ASKED = {"place": "Köln", "days": [1, 2], "at": {"lat": 50.9, "lon": None}, "sure": True}
USED = [
    user("What is the weather in Köln?"),
    assistant("", tool_calls=[call(ASKED)]),
    answer('{"sky": "grey", "°C": 7}'),
]
THOUGHT = [
    user("Who is taller?"),
    assistant("Tom.", reasoning_content="Lucy is small.\nTom is not."),
    user("Why?"),
    assistant("He grew.", reasoning_content="There are <reasons>."),
]
PARTS = [
    {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
    user([{"type": "text", "text": "One"}, {"type": "text", "text": " and two."}]),
    assistant([{"type": "text", "text": "Three."}]),
    user([{"type": "text", "text": "Four?"}]),
]
BOOKS: list[dict[str, Any]] = [
    {"title": "Kites", "text": "A kite is red.", "doc_id": 0},
    {"title": "Bread & <more>", "text": "Größe: 10 %", "doc_id": "b"},
]

CONVERSATIONS: dict[str, Conversation] = {
    "short": Conversation(SHORT),
    "no generation": Conversation([*SHORT, assistant("Lucy.")], add_generation_prompt=False),
    "long": Conversation(LONG),
    "system alone": Conversation([SYSTEM, *SHORT], variables={"enable_thinking": False}),
    "system in the middle": Conversation([*SHORT, assistant("Lucy."), SYSTEM, *SHORT]),
    "two of one role": Conversation([*SHORT, *SHORT]),
    "begins with the assistant": Conversation([assistant("Hello!"), *SHORT]),
    "thinking": Conversation([SYSTEM, *THOUGHT, *SHORT], variables={"enable_thinking": True}),
    "thinking at the end": Conversation(THOUGHT, add_generation_prompt=False),
    "thinking in the text": Conversation(
        [*SHORT, assistant("<think>\nWho?\n</think>\n\nLucy."), user("Sure?")],
        variables={"thinking": True, "reasoning_effort": "high"},
    ),
    "tools unused": Conversation([SYSTEM, *SHORT], [WEATHER, CLOCK]),
    "tool called": Conversation(USED, [WEATHER, CLOCK]),
    "tool called, arguments as text": Conversation(
        [USED[0], assistant(None, tool_calls=[call('{"place": "Köln"}')]), *USED[2:]], [WEATHER]
    ),
    "two tools called": Conversation(
        [
            SYSTEM,
            USED[0],
            assistant(
                "Let me see.",
                reasoning_content="Two questions.",
                tool_calls=[call(ASKED), call({}, "clock", "call00002")],
            ),
            *USED[2:],
            answer({"time": "12:00"}, "call00002"),
            assistant("Grey, at noon."),
            user("Thanks"),
        ],
        [WEATHER, CLOCK],
        variables={"tool_choice": "auto", "parallel_tool_calls": True},
    ),
    "parts": Conversation(PARTS),
    "documents": Conversation([SYSTEM, *SHORT], None, BOOKS, variables={"citation_mode": "fast"}),
    "no tools": Conversation(
        SHORT, [], [], variables={"functions": "[clock]", "datetime": "2024-02-29", "date": "today"}
    ),
    "developer": Conversation([{"role": "developer", "content": "Be brief."}, *SHORT]),
    "empty": Conversation([SYSTEM, user(""), assistant("")]),
}
