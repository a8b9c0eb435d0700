"""Answers of models in their templates' formats, one each, written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

__all__ = [
    "ANSWERS",
    "CLOCK",
    "TEMPLATES",
    "TOOLS",
    "WEATHER",
    "Answer",
    "needs_templates",
    "source",
]

TEMPLATES = Path(__file__).parents[2] / "vendor" / "llama.cpp" / "models" / "templates"
needs_templates = pytest.mark.skipif(
    not TEMPLATES.is_dir(),
    reason="vendor/llama.cpp has no templates: python vendor/fetch.py --force",
)


def source(name: str) -> str:
    """Return a template that comes with llama.cpp."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def tool(name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": f"Tells the {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


WEATHER = tool("get_weather", {"place": {"type": "string"}, "days": {"type": "integer"}}, ["place"])
CLOCK = tool("clock", {"zone": {"type": "string"}}, ["zone"])
TOOLS = [WEATHER, CLOCK]

PARIS = ("get_weather", {"place": "Paris", "days": 3})
ROME = ("get_weather", {"place": "Rome"})


class Answer(NamedTuple):
    """A text of a format, and its meaning."""

    template: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = (PARIS,)
    variables: dict[str, Any] = {}  # noqa: RUF012 - never changed


JSON_CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Paris", "days": 3}}\n</tool_call>'
)
XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=place>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)

ANSWERS: dict[str, Answer] = {
    "Hermes 3": Answer("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", JSON_CALL),
    "Qwen 2.5, two calls": Answer(
        "Qwen-Qwen2.5-7B-Instruct",
        f'{JSON_CALL}\n<tool_call>\n{{"name": "get_weather", "arguments": {{"place": "Rome"}}}}\n'
        "</tool_call>",
        calls=(PARIS, ROME),
    ),
    "Qwen 3": Answer(
        "Qwen-Qwen3-0.6B", f"<think>\nWhich town?\n</think>\n\n{JSON_CALL}", reasoning="Which town?"
    ),
    "Qwen 3, without thinking": Answer(
        "Qwen-Qwen3-0.6B", JSON_CALL, variables={"enable_thinking": False}
    ),
    "Qwen 3 Coder": Answer("Qwen3-Coder", XML_CALL),
    "Qwen 3.5": Answer(
        "Qwen3.5-4B", f"Which town?\n</think>\n\n{XML_CALL}", reasoning="Which town?"
    ),
    "Granite 4": Answer("ibm-granite-granite-4.0", JSON_CALL),
    "Llama 3.1": Answer(
        "meta-llama-Llama-3.1-8B-Instruct",
        '{"name": "get_weather", "parameters": {"place": "Paris", "days": 3}}',
    ),
    "Functionary 3.1": Answer(
        "meetkai-functionary-medium-v3.1",
        '<function=get_weather>{"place": "Paris", "days": 3}</function>',
    ),
    "Mistral Nemo": Answer(
        "mistralai-Mistral-Nemo-Instruct-2407",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"place": "Paris", "days": 3}, '
        '"id": "call00001"}]',
    ),
    "Mistral Small 3.2": Answer(
        "Mistral-Small-3.2-24B-Instruct-2506",
        '[TOOL_CALLS]get_weather[CALL_ID]call00001[ARGS]{"place": "Paris", "days": 3}',
    ),
    "Ministral 3": Answer(
        "mistralai-Ministral-3-14B-Reasoning-2512",
        '[THINK]Which town?[/THINK][TOOL_CALLS]get_weather[ARGS]{"place": "Paris", "days": 3}',
        reasoning="Which town?",
    ),
    "DeepSeek V3.1": Answer(
        "deepseek-ai-DeepSeek-V3.1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"  # noqa: RUF001
        '{"place": "Paris", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',  # noqa: RUF001
    ),
    "GPT-OSS": Answer(
        "openai-gpt-oss-120b",
        "<|channel|>analysis<|message|>Which town?<|end|><|start|>assistant"
        " to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"place": "Paris", "days": 3}',
        reasoning="Which town?",
    ),
    "Gemma 4": Answer(
        "google-gemma-4-31B-it",
        '<|tool_call>call:get_weather{days:3,place:<|"|>Paris<|"|>}<tool_call|>',
    ),
    "GLM 4.6": Answer(
        "GLM-4.6",
        "\n<think>Which town?</think>\n<tool_call>get_weather\n<arg_key>place</arg_key>\n"
        "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>",
        reasoning="Which town?",
    ),
    "Kimi K2": Answer(
        "moonshotai-Kimi-K2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"place": "Paris", "days": 3}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
    ),
    "Command R7B": Answer(
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        "<|START_THINKING|>Which town?<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "get_weather", '
        '"parameters": {"place": "Paris", "days": 3}}\n]<|END_ACTION|>',
        reasoning="Which town?",
    ),
    "MiniMax M2": Answer(
        "MiniMax-M2",
        'Which town?\n</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="place">Paris</parameter>\n<parameter name="days">3</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        reasoning="Which town?",
    ),
    "LFM 2.5": Answer(
        "LFM2.5-8B-A1B",
        "<|tool_call_start|>[get_weather(place='Paris', days=3)]<|tool_call_end|>",
    ),
    "Apertus": Answer(
        "Apertus-8B-Instruct",
        '<|tools_prefix|>[{"get_weather": {"place": "Paris", "days": 3}}]<|tools_suffix|>',
    ),
    "Seed OSS": Answer(
        "ByteDance-Seed-OSS",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=place>Paris</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
    ),
    "content before a call": Answer(
        "Qwen-Qwen2.5-7B-Instruct", f"I look it up.\n{JSON_CALL}", content="I look it up."
    ),
    "content alone": Answer("Qwen-Qwen3-0.6B", "It is grey.", content="It is grey.", calls=()),
    "content of Gemma 2": Answer(
        "google-gemma-2-2b-it",
        "It is <b>grey</b>: {7} [°C]",
        content="It is <b>grey</b>: {7} [°C]",
        calls=(),
    ),
}
