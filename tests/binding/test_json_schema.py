"""``Sampler(json_schema=...)``: every text that a grammar allows is JSON that the schema allows."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from pykvcache import LlamaModel, Sampler
from pykvcache._json_pattern import convertible_pattern
from pykvcache._json_schema import schema_grammar, violation
from pykvcache.errors import GrammarError

NODE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer"},
        "next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]},
    },
    "required": ["v", "next"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "any": {},
    "string": {"type": "string"},
    "date-time": {"type": "string", "format": "date-time"},
    "pattern with a dot": {"type": "string", "pattern": "^.{2,6}$"},
    "pattern with what is not": {"type": "string", "pattern": "^[^a]{1,4}$"},
    "pattern of groups": {"type": "string", "pattern": "^(?:cat|dog)s?$"},
    "pattern of words": {"type": "string", "pattern": r"^\w{1,3}\s\w+?$"},
    "pattern of signs": {"type": "string", "pattern": r"^a\.b\/\[c\]\-$"},
    "pattern of nothing": {"type": "string", "pattern": "^$"},
    "between": {"type": "integer", "minimum": -20, "exclusiveMaximum": 17},
    "above": {"type": "integer", "exclusiveMinimum": 9.5},
    "below": {"type": "integer", "maximum": -103},
    "enum": {"enum": ["a", 1, None, {"x": [1]}]},
    "enum of a type": {"type": "string", "enum": ["a", 1, 'b\n"q"']},
    "const": {"const": "Größe \\ x"},
    "array": {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "items": False},
    "object": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "integer"}, "c": {"type": "null"}},
        "required": ["b"],
    },
    "optional": {"properties": {f"p{i}": {"type": "boolean"} for i in range(12)}},
    "more": {"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "boolean"}},
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "array", "maxItems": 0}]},
    "types": {"type": ["string", "null"], "maxLength": 3},
    "a type of alternatives": {"type": "string", "anyOf": [{"maxLength": 2}, {"pattern": "^zz$"}]},
    "references": {"$defs": {"N": NODE}, "$ref": "#/$defs/N"},
    "names of other alphabets": {
        "$defs": {"Ä": {"const": 1}, "Ö": {"const": 2}, "A_B": {"const": 3}, "A-B": {"const": 4}},
        "type": "array",
        "prefixItems": [{"$ref": f"#/$defs/{name}"} for name in ("Ä", "Ö", "A_B", "A-B")],
    },
    "allOf": {
        "allOf": [
            {"$ref": "#/$defs/B"},
            {"type": "object", "properties": {"y": {"type": "null"}}, "required": ["y"]},
        ],
        "$defs": {"B": {"properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
    },
    "allOf of one": {
        "type": "object",
        "properties": {"k": {"allOf": [{"$ref": "#/$defs/E"}], "default": "a", "title": "K"}},
        "required": ["k"],
        "$defs": {"E": {"enum": ["a", "b"], "type": "string"}},
    },
    "odd names": {
        "properties": {
            name: {"type": "null"}
            for name in ("space", "string", "root", "a b", "ü", 'q"', "x.y", "object-kv")
        },
        "required": ["space", "string", "root", "a b", "ü", 'q"', "x.y", "object-kv"],
    },
}


@pytest.fixture(scope="module")
def pieces(vocab: LlamaModel) -> list[bytes]:
    n_vocab = vocab.native.n_vocab
    return [vocab.token_to_piece(token, special=True) for token in range(n_vocab)]


def written(sampler: Sampler, pieces: list[bytes], seed: int, eos: int) -> str | None:
    random_logits = np.random.default_rng(seed)
    # Bytes that are no characters by themselves; the grammar allows any order.
    broken = [i for i, piece in enumerate(pieces) if piece and max(piece) > 127 and len(piece) < 2]
    ends = [i for i, piece in enumerate(pieces) if piece in (b'"', b"}", b"]")]
    text = b""
    for i in range(300):
        logits = random_logits.normal(size=len(pieces)).astype(np.float32)
        logits[broken] = -30
        if i > 30:
            logits[ends] += i / 5
            logits[eos] += i
        token = sampler.sample(logits)
        if token == eos:
            return text.decode()
        text += pieces[token]
    return None


@pytest.mark.parametrize("name", SCHEMAS)
def test_generated_text_follows_the_schema(
    vocab: LlamaModel, pieces: list[bytes], name: str
) -> None:
    schema, eos = SCHEMAS[name], vocab.token_eos
    assert eos is not None
    found = set()
    for seed in range(8):
        sampler = Sampler(temperature=1, seed=seed, json_schema=schema, model=vocab)
        text = written(sampler, pieces, seed, eos)
        if text is not None:
            assert violation(json.loads(text), schema) is None, text
            found.add(text)
    assert found


@pytest.mark.parametrize("more", [{}, {"repeat_penalty": 1.7}, {"logit_bias": {40: 9.0}}])
def test_the_greedy_token_is_the_likeliest_that_is_allowed(
    vocab: LlamaModel, more: dict[str, Any]
) -> None:
    """The likeliest of all is tried first, and the others only where the grammar refuses it."""
    sampler = Sampler(temperature=0, json_schema=SCHEMAS["object"], model=vocab, **more)
    draw = np.random.default_rng(5)
    allowed = 0
    for _ in range(40):
        logits = draw.normal(size=vocab.native.n_vocab).astype(np.float32)
        found = int(sampler.logprobs(logits).argmax())
        allowed += found == logits.argmax()
        assert sampler.sample(logits) == found
        if found == vocab.token_eos:
            break
    assert allowed < 40


def test_a_schema_may_be_text(vocab: LlamaModel) -> None:
    sampler = Sampler(json_schema='{"const": 1}', model=vocab)
    assert "grammar='root" in repr(sampler)
    sampler.accept(vocab.tokenize("1", add_special=False)[-1], grammar=True)


def matching(grammar: str) -> re.Pattern[str]:
    (rule,) = re.findall(r"^root ::= (.*)$", grammar, re.MULTILINE)
    rule = re.sub(r'"((?:[^"\\]|\\.)*)"', lambda found: re.escape(found[1]), rule)
    return re.compile(rule.replace(" ", ""))


def test_integers_have_the_bounds_of_the_schema() -> None:
    """The converter itself reads 105 as 15 where a minimum stands alone."""
    draw = random.Random(7)
    for _ in range(400):
        low, high = sorted(draw.randint(-2000, 2000) for _ in range(2))
        given = draw.choice(
            [{"minimum": low}, {"maximum": high}, {"minimum": low, "maximum": high}]
        )
        schema = {"type": "integer", **given}
        pattern = matching(schema_grammar(schema, strict=True))
        near = [n + d for n in given.values() for d in (-10, -1, 0, 1, 10)]
        for n in [*near, 0, *(draw.randint(-3000, 3000) for _ in range(30))]:
            assert bool(pattern.fullmatch(str(n))) == (violation(n, schema) is None), (schema, n)


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"type": "number", "minimum": 0}, "minimum (#)"),
        ({"type": "integer", "multipleOf": 5}, "multipleOf (#)"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems (#)"),
        ({"not": {"type": "null"}}, "not (#)"),
        ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties (#)"),
        ({"type": "string", "format": "email"}, "format (#)"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "minLength (#)"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern '(?=a)b': a group begins with '(?' (#)"),
        ({"type": "string", "pattern": r"^\bx$"}, r"pattern '^\\bx$': \b has no equivalent (#)"),
        ({"type": "string", "pattern": '^"$'}, "characters that JSON escapes"),
        ({"type": "string", "pattern": "(" * 101 + "a" + ")" * 101}, "nested deeper than 100"),
        ({"anyOf": [{"type": "null"}], "properties": {}}, "properties (#)"),
        ({"if": {}, "then": {}}, "if (#), then (#)"),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "allOf (#)"),
        ({"type": "string", "nonsense": 1}, "nonsense (#)"),
    ],
)
def test_keywords_that_no_grammar_holds_to_are_named(
    vocab: LlamaModel, schema: dict[str, Any], names: str
) -> None:
    with pytest.raises(GrammarError, match=re.escape(names)) as caught:
        Sampler(json_schema=schema, model=vocab)
    assert caught.value.what == "json_schema"
    Sampler(json_schema=schema, strict=False, model=vocab)


def test_notes_and_keywords_of_other_types_say_nothing(vocab: LlamaModel) -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T",
        "description": "d",
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minLength": 3, "format": "int64", "x-order": 1, "default": 0},
            "l": {"type": "array", "uniqueItems": False, "examples": [[]]},
        },
        "additionalProperties": False,
    }
    Sampler(json_schema=schema, model=vocab)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chained(n: int) -> dict[str, Any]:
    links = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{n}": {}}}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (nested(65), "nested deeper than 64"),
        (chained(1000), "nested deeper than 64"),
        ({"properties": {f"p{i}": {} for i in range(201)}}, "201 properties are optional"),
        ({"anyOf": [{"const": i} for i in range(5000)]}, "more than 4096 schemas"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength is above maxLength"),
        ({"type": "integer", "minimum": 10**16}, "must lie in"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer lies between"),
        ({"type": "text"}, "there is no type 'text'"),
        ({"anyOf": []}, "'anyOf' must be a list that is not empty"),
        ({"enum": []}, "'enum' must be a list that is not empty"),
        ({"enum": [1], "type": "string"}, "allow none of the values of"),
        ({"$ref": "#/$defs/x"}, "has no target in the schema"),
        ({"$ref": "https://example.org/x"}, "points outside the schema"),
        ({"properties": {"a": False}}, "no value is allowed"),
        ({"properties": [], "type": "object"}, "'properties' must be an object"),
        ({"required": ["a"], "properties": {}, "additionalProperties": False}, "not allowed"),
        ("{", "not a JSON schema"),
        ({"const": object()}, "not a JSON schema"),
        ({"type": "array", "minItems": float("inf")}, "must lie|not a JSON"),
        ({"enum": [1], "minimum": "one"}, "minimum|allow none"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "left recursion"),
    ],
)
def test_schemas_without_a_grammar_are_refused(vocab: LlamaModel, schema: Any, why: str) -> None:
    for strict in (True, False):
        with pytest.raises(GrammarError, match=why):
            Sampler(json_schema=schema, strict=strict, model=vocab)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^a+$",
        r"^[^x]$",
        r"[0-9]{2}",
        r"^(ab|c)*$",
        r"^\w\d\s$",
        r"^a.c",
        r"c$",
        r"^[a\]b-]+$",
        "ab|c",
    ],
)
def test_converted_patterns_allow_only_texts_of_the_schema(pattern: str) -> None:
    """The converted pattern is a pattern too, so Python's engine can check it."""
    made = convertible_pattern(pattern)
    draw = random.Random(3)
    for _ in range(3000):
        text = "".join(draw.choices('abcx019 _-]["\\é\n', k=draw.randint(0, 4)))
        if re.fullmatch(made[1:-1], text):
            assert re.search(pattern, text), (made, text)
            assert json.dumps(text, ensure_ascii=False) == f'"{text}"'


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("^(a+)+$", "a" * 40 + "!"),
        ("^(a|a)*$", "a" * 40 + "!"),
        ("a*a*a*a*a*a*b", "a" * 3000),
        ("a?" * 30 + "a" * 30, "a" * 29),
    ],
)
def test_a_pattern_that_would_take_years_is_not_tried(pattern: str, text: str) -> None:
    assert violation(text, {"type": "string", "pattern": pattern}) is None


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"^(\d{3}-)+$", "123-45"), ("^(foo|bar)$", "baz"), ("^[a-z]+@[a-z]+$", "a" * 500)],
)
def test_ordinary_patterns_are_checked(pattern: str, text: str) -> None:
    assert violation(text, {"type": "string", "pattern": pattern}) is not None
