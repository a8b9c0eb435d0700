"""JSON schemas: conversion to grammars with llama.cpp's converter, and validation of values.

The converter silently ignores unknown keywords. So a schema is rewritten with the keywords that
the converter supports, and the other keywords are reported.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from pykvcache._grammar import REPEAT_MAX
from pykvcache._json_pattern import UnsupportedPattern, convertible_pattern, matches
from pykvcache.errors import GrammarError

__all__ = ["as_schema", "convertible", "schema_grammar", "violation"]

Schema = dict[str, Any]

#: Maximum nesting of schemas, including references: the converter recurses.
DEPTH_MAX = 64
#: Maximum number of optional properties of an object: the converter takes cubic time.
OPTIONAL_MAX = 200
SCHEMAS_MAX = 4096
#: Largest bound of an integer: the converter's grammars have at most 16 digits.
BOUND_MAX = 10**15

# fmt: off
_ANNOTATIONS = frozenset([
    "$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType",
    "default", "definitions", "deprecated", "description", "discriminator", "example", "examples",
    "readOnly", "title", "writeOnly",
])
# fmt: on
# Keywords that apply to one type only.
_OF_TYPE = {
    "object": "additionalProperties dependencies dependentRequired dependentSchemas maxProperties "
    "minProperties patternProperties properties propertyNames required unevaluatedProperties",
    "array": "additionalItems contains items maxContains maxItems minContains minItems prefixItems "
    "unevaluatedItems uniqueItems",
    "string": "format maxLength minLength pattern",
    "number": "exclusiveMaximum exclusiveMinimum maximum minimum multipleOf",
}
_KEYWORDS = {kind: frozenset(names.split()) for kind, names in _OF_TYPE.items()}
_KEYWORDS["integer"] = _KEYWORDS["number"]
_NONE: frozenset[str] = frozenset()
_OF_ANY = _NONE.union(*_KEYWORDS.values())
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
# The converter lets additional keys begin with characters that JSON escapes.
_KEY_RULE = re.compile(r"^\S*additional-k\d* ::= .*$", re.MULTILINE)
_FIRST_OF_KEY = ('[^"', '[^"\\\\\\x7F\\x00-\\x1F')
# The converter allows two lines and 20 tabs of white space; a small model can get lost in it.
_SPACE_RULE = re.compile(r"^space ::= .*$", re.MULTILINE)
_FORMATS = re.compile("date|time|date-time|uuid[1-5]?")


def as_schema(given: object, what: str) -> Schema:
    """Return a schema, given as a mapping or JSON text, as plain values."""
    try:
        text = given if isinstance(given, str) else json.dumps(given, default=_mapping)
        schema = json.loads(text, parse_constant=_no_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"{what} is not a JSON schema: {error}", what=what) from None
    if not isinstance(schema, dict):
        raise GrammarError(f"{what} is not a JSON schema: it must be an object", what=what)
    return schema


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number in JSON")


def _mapping(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds a {type(value).__name__}")


def schema_grammar(schema: Schema, *, strict: bool) -> str:
    """Return the GBNF grammar of the JSON texts that a schema allows; see `convertible`."""
    from pykvcache._native import chat_format

    what = "json_schema"
    text = json.dumps(convertible(schema, strict=strict, what=what))
    try:
        grammar = chat_format.schema_grammar(text.encode())
    except (RuntimeError, ValueError) as error:
        raise GrammarError(f"{what} has no grammar: {error}", what=what) from None
    grammar = _KEY_RULE.sub(lambda found: found[0].replace(*_FIRST_OF_KEY), grammar)
    return _SPACE_RULE.sub('space ::= " "?', grammar)


def convertible(schema: Schema, *, strict: bool, what: str) -> Schema:
    """Return a schema that llama.cpp's converter supports and that allows no other values.

    With `strict`, keywords that a grammar cannot enforce are refused; otherwise they are dropped.
    `what` names the schema in errors.
    """
    writer = _Writer(schema, what)
    try:
        made = writer.write(schema, "#", 0)
    except (AttributeError, TypeError, ValueError, OverflowError, KeyError) as error:
        if isinstance(error, GrammarError):
            raise
        # A keyword's value has a type that JSON Schema does not allow.
        raise GrammarError(f"{what} is not a JSON schema: {error}", what=what) from None
    if writer.ignored and strict:
        text = ", ".join(writer.ignored[:20])
        raise GrammarError(
            f"{what} has keywords that a grammar cannot enforce: {text}. Pass strict=False to "
            "ignore them",
            what=what,
            value=tuple(writer.ignored),
        )
    return {**made, "$defs": writer.definitions} if writer.definitions else made


class _Writer:
    """Rewrites schemas with the keywords that the converter supports, and records the others."""

    def __init__(self, root: Schema, what: str) -> None:
        self.root, self.what = root, what
        self.definitions: dict[str, Schema] = {}
        self.ignored: list[str] = []
        self._names: dict[str, str] = {}
        self._n = 0

    def _fail(
        self, path: str, why: str, value: object = None, limit: object = None
    ) -> GrammarError:
        place = f"{self.what} {path}"
        return GrammarError(f"{place}: {why}", what=place, value=value, limit=limit)

    def write(self, schema: object, path: str, depth: int) -> Schema:
        """Rewrite a schema and its subschemas."""
        self._n += 1
        if depth > DEPTH_MAX:
            raise self._fail(path, f"schemas are nested deeper than {DEPTH_MAX}", depth, DEPTH_MAX)
        if self._n > SCHEMAS_MAX:
            raise self._fail(path, f"there are more than {SCHEMAS_MAX} schemas", limit=SCHEMAS_MAX)
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            why = "no value is allowed" if schema is False else "a schema must be an object"
            raise self._fail(path, why)
        kinds = schema.get("type")
        if "$ref" in schema:
            self._ignore(schema, path, {"$ref"})
            return self._reference(schema["$ref"], path, depth)
        if "const" in schema or "enum" in schema:
            return self._values(schema, path)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._alternatives(schema, key, path, depth)
        if isinstance(kinds, list):
            if not kinds:
                raise self._fail(path, "'type' is empty")
            return {"anyOf": [self.write({**schema, "type": k}, path, depth + 1) for k in kinds]}
        if "allOf" in schema:
            return self._together(schema, path, depth)
        kind = kinds if kinds is not None else _implied(schema)
        if kind is None:
            self._ignore(schema, path, set())
            return {}
        if not isinstance(kind, str) or kind not in _TYPES:
            raise self._fail(path, f"there is no type {kind!r}", kind, list(_TYPES))
        if kind == "object":
            return self._object(schema, path, depth)
        if kind == "array":
            return self._array(schema, path, depth)
        if kind == "string":
            return self._string(schema, path)
        if kind == "integer":
            return self._integer(schema, path)
        self._ignore(schema, path, set(), kind)
        return {"type": kind}

    def _ignore(self, schema: Schema, path: str, taken: set[str], kind: str | None = None) -> None:
        """Record unsupported keywords that apply to these values."""
        for name, value in schema.items():
            is_note = name in _ANNOTATIONS or name.startswith("x-") or name == "type"
            is_of_others = kind is not None and name in _OF_ANY - _KEYWORDS.get(kind, _NONE)
            is_empty = name == "uniqueItems" and value is False
            if not (name in taken or is_note or is_of_others or is_empty):
                self.ignored.append(f"{name} ({path})")

    def _reference(self, target: object, path: str, depth: int) -> Schema:
        if not isinstance(target, str) or not target.startswith("#"):
            raise self._fail(path, f"$ref {target!r} points outside the schema", target)
        if target not in self._names:
            # Plain names: the converter merges rules whose names differ only in special characters.
            name = self._names[target] = f"pykvcache-{len(self._names)}"
            self.definitions[name] = {}
            self.definitions[name] = self.write(self._resolve(target, path), target, depth + 1)
        return {"$ref": f"#/$defs/{self._names[target]}"}

    def _resolve(self, target: str, path: str) -> object:
        found: Any = resolve(self.root, target)
        if found is None:
            raise self._fail(path, f"$ref {target} has no target in the schema", target)
        return found

    def _values(self, schema: Schema, path: str) -> Schema:
        key = "const" if "const" in schema else "enum"
        values = [schema["const"]] if key == "const" else schema["enum"]
        if not isinstance(values, list) or not values:
            raise self._fail(path, "'enum' must be a list that is not empty")
        rest = {name: value for name, value in schema.items() if name != key}
        allowed = [one for one in values if violation(one, rest, self.root) is None]
        if not allowed:
            raise self._fail(path, f"the other keywords allow none of the values of '{key}'")
        return {"enum": allowed}

    def _alternatives(self, schema: Schema, key: str, path: str, depth: int) -> Schema:
        self._ignore(schema, path, {key})
        found = schema[key]
        if not isinstance(found, list) or not found:
            raise self._fail(path, f"'{key}' must be a list that is not empty")
        made = []
        for i, one in enumerate(found):
            if isinstance(one, dict) and "type" in schema and not _has_values(one):
                one = {"type": schema["type"], **one}
            made.append(self.write(one, f"{path}/{key}/{i}", depth + 1))
        return {"anyOf": made}

    def _together(self, schema: Schema, path: str, depth: int) -> Schema:
        """Merge ``allOf`` into one schema: one member, or objects with different properties."""
        members = schema["allOf"]
        if not isinstance(members, list) or not members:
            raise self._fail(path, "'allOf' must be a list that is not empty")
        own = {k: v for k, v in schema.items() if k != "allOf" and k not in _ANNOTATIONS}
        if len(members) == 1 and own.keys() <= {"type"}:
            return self.write(members[0], f"{path}/allOf/0", depth + 1)
        merged: Schema = {"type": "object", "properties": {}, "required": []}
        for one in [*members, own] if own else members:
            seen = 0
            while isinstance(one, dict) and "$ref" in one and seen <= DEPTH_MAX:
                one, seen = self._resolve(str(one["$ref"]), path), seen + 1
            plain = {"type", "properties", "required", "additionalProperties"}
            if (
                not isinstance(one, dict)
                or not one.keys() <= plain | _ANNOTATIONS
                or one.get("type", "object") != "object"
                or one.get("additionalProperties", True) is not True
                or merged["properties"].keys() & one.get("properties", {}).keys()
                or not isinstance(one.get("required", []), list)
            ):
                self.ignored.append(f"allOf ({path})")
                return self.write(
                    {k: v for k, v in schema.items() if k != "allOf"}, path, depth + 1
                )
            merged["properties"] |= one.get("properties", {})
            merged["required"] += one.get("required", [])
        return self.write(merged, path, depth + 1)

    def _object(self, schema: Schema, path: str, depth: int) -> Schema:
        self._ignore(schema, path, {"properties", "required", "additionalProperties"}, "object")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        more = schema.get("additionalProperties", "properties" not in schema)
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise self._fail(path, "'properties' must be an object and 'required' a list")
        for name in required:
            if name not in properties:
                if more is False and "additionalProperties" in schema:
                    raise self._fail(path, f"{name!r} is required but not allowed", name)
                properties = {**properties, name: more if isinstance(more, dict) else {}}
        n = len(properties) - len(set(required))
        if n > OPTIONAL_MAX:
            raise self._fail(
                path, f"{n} properties are optional: the limit is {OPTIONAL_MAX}", n, OPTIONAL_MAX
            )
        made: Schema = {"type": "object"}
        if properties:
            made["properties"] = {
                name: self.write(one, f"{path}/properties/{name}", depth + 1)
                for name, one in properties.items()
            }
            made["required"] = list(dict.fromkeys(required))
        if isinstance(more, dict):
            more = self.write(more, f"{path}/additionalProperties", depth + 1) or True
        if not isinstance(more, (bool, dict)):
            raise self._fail(path, "'additionalProperties' must be a schema")
        return {**made, "additionalProperties": more}

    def _array(self, schema: Schema, path: str, depth: int) -> Schema:
        first = schema.get("prefixItems", schema.get("items"))
        low, high = self._counts(schema, "Items", path)
        taken = {"items", "prefixItems", "additionalItems", "minItems", "maxItems"}
        if isinstance(first, list):
            # Exactly these items: stricter than the schema, but valid.
            if not low <= len(first) <= (len(first) if high is None else high):
                taken -= {"minItems", "maxItems"}
            self._ignore(schema, path, taken, "array")
            items = [self.write(one, f"{path}/{i}", depth + 1) for i, one in enumerate(first)]
            return {"type": "array", "prefixItems": items}
        self._ignore(schema, path, taken, "array")
        made: Schema = {"type": "array", "minItems": low}
        if first is False:
            high = 0 if high is None else high
        elif first is not None:
            made["items"] = self.write(first, f"{path}/items", depth + 1)
        return made if high is None else {**made, "maxItems": high}

    def _string(self, schema: Schema, path: str) -> Schema:
        if "pattern" in schema:
            made: Schema = {"type": "string"}
            try:
                made["pattern"] = convertible_pattern(str(schema["pattern"]))
            except UnsupportedPattern as error:
                self.ignored.append(f"pattern {schema['pattern']!r}: {error} ({path})")
            self._ignore(schema, path, {"pattern"}, "string")
            return made
        if isinstance(schema.get("format"), str) and _FORMATS.fullmatch(schema["format"]):
            self._ignore(schema, path, {"format"}, "string")
            return {"type": "string", "format": schema["format"]}
        self._ignore(schema, path, {"minLength", "maxLength"}, "string")
        low, high = self._counts(schema, "Length", path)
        made = {"type": "string", "minLength": low}
        return made if high is None else {**made, "maxLength": high}

    def _counts(self, schema: Schema, of: str, path: str) -> tuple[int, int | None]:
        low, high = schema.get(f"min{of}", 0), schema.get(f"max{of}")
        for one in (low, high):
            if one is not None and (not _is_integer(one) or not 0 <= one <= REPEAT_MAX):
                raise self._fail(
                    path, f"min{of} and max{of} must lie in [0, {REPEAT_MAX}]", one, REPEAT_MAX
                )
        if high is not None and low > high:
            raise self._fail(path, f"min{of} is above max{of}", low, high)
        return int(low), None if high is None else int(high)

    def _integer(self, schema: Schema, path: str) -> Schema:
        bounds = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
        self._ignore(schema, path, bounds, "integer")
        for name in bounds & schema.keys():
            value = schema[name]
            if not _is_number(value) or not abs(value) <= BOUND_MAX:
                told = f"{name} must lie in [-{BOUND_MAX}, {BOUND_MAX}]"
                raise self._fail(path, told, value, BOUND_MAX)
        if not bounds & schema.keys():
            return {"type": "integer"}
        # Always both bounds: with a single one the converter reads 105 as 15.
        low = max(
            math.ceil(schema.get("minimum", -BOUND_MAX)),
            math.floor(schema.get("exclusiveMinimum", -BOUND_MAX - 1)) + 1,
        )
        high = min(
            math.floor(schema.get("maximum", BOUND_MAX)),
            math.ceil(schema.get("exclusiveMaximum", BOUND_MAX + 1)) - 1,
        )
        if low > high:
            raise self._fail(path, "no integer lies between its bounds")
        return {"type": "integer", "minimum": low, "maximum": high}


def _implied(schema: Schema) -> str | None:
    """Return the type that the converter assumes for a schema without one."""
    for kind, names in (
        ("object", ("properties", "required", "additionalProperties")),
        ("array", ("items", "prefixItems")),
        ("string", ("pattern", "minLength", "maxLength", "format")),
    ):
        if any(name in schema for name in names):
            return kind
    return None


def _has_values(schema: Schema) -> bool:
    return any(k in schema for k in ("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return _is_number(value) and value == int(value)  # type: ignore[call-overload]


def resolve(root: Schema, reference: str) -> object:
    """Return the target of a reference; None if it does not exist."""
    found: Any = root
    for part in unquote(reference[1:]).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, dict) and part in found:
            found = found[part]
        else:
            return None
    return found


# Values against schemas ----------------------------------------------------------------


def violation(value: object, schema: object, root: Schema | None = None) -> str | None:
    """Return the first fault of a value under a schema, with its place; None if the value is valid.

    Unknown keywords allow everything, as JSON Schema specifies.
    """
    root = root if root is not None else schema if isinstance(schema, dict) else {}
    try:
        return next(_violations(value, schema, root, "", 0), None)
    except (AttributeError, TypeError, ValueError, OverflowError, re.error) as error:
        # A keyword's value has a type that JSON Schema does not allow.
        return f"the schema is not valid: {error}"


def _violations(value: Any, schema: Any, root: Schema, at: str, depth: int) -> Iterator[str]:
    if schema is False or depth > 4 * DEPTH_MAX:
        yield f"{at or 'the value'} is not allowed"
        return
    if not isinstance(schema, dict):
        return

    def below(one: object, inner: object, place: str = at) -> bool:
        return next(_violations(one, inner, root, place, depth + 1), None) is None

    name = at or "the value"
    kinds = schema.get("type")
    if kinds is not None and not any(
        _is_of(value, kind) for kind in (kinds if isinstance(kinds, list) else [kinds])
    ):
        yield f"{name} must be of type {kinds}, but is {json.dumps(value)[:60]}"
        return
    if "$ref" in schema:
        yield from _violations(value, resolve(root, str(schema["$ref"])), root, at, depth + 1)
    if "const" in schema and not _equal(value, schema["const"]):
        yield f"{name} must be {json.dumps(schema['const'])}"
    if "enum" in schema and not any(_equal(value, one) for one in schema["enum"]):
        yield f"{name} is {json.dumps(value)[:60]}, which is none of {json.dumps(schema['enum'])}"
    for inner in schema.get("allOf", ()):
        yield from _violations(value, inner, root, at, depth + 1)
    if "anyOf" in schema and not any(below(value, inner) for inner in schema["anyOf"]):
        yield f"{name} matches no schema of anyOf"
    if "oneOf" in schema and sum(below(value, inner) for inner in schema["oneOf"]) != 1:
        yield f"{name} must match exactly one schema of oneOf"
    if "not" in schema and below(value, schema["not"]):
        yield f"{name} is not allowed"
    if isinstance(value, str):
        yield from _of_string(value, schema, name)
    elif _is_number(value):
        yield from _of_number(value, schema, name)
    elif isinstance(value, list):
        yield from _of_array(value, schema, root, at, depth)
    elif isinstance(value, dict):
        yield from _of_object(value, schema, root, at, depth)


def _is_of(value: object, kind: object) -> bool:
    if kind == "boolean" or isinstance(value, bool):
        return kind == "boolean" and isinstance(value, bool)
    if kind == "integer":
        return _is_number(value) and math.isfinite(value) and _is_integer(value)  # type: ignore[arg-type]
    return not isinstance(kind, str) or isinstance(value, _TYPES.get(kind, (object,)))


def _equal(a: object, b: object) -> bool:
    return isinstance(a, bool) is isinstance(b, bool) and a == b


def _of_string(value: str, schema: Schema, name: str) -> Iterator[str]:
    if len(value) < schema.get("minLength", 0):
        yield f"{name} has fewer than {schema['minLength']} characters"
    if len(value) > schema.get("maxLength", math.inf):
        yield f"{name} has more than {schema['maxLength']} characters"
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        with contextlib.suppress(re.error):
            if not matches(pattern, value):
                yield f"{name} does not match {pattern!r}"


def _of_number(value: float, schema: Schema, name: str) -> Iterator[str]:
    compared = {
        "minimum": operator.lt,
        "exclusiveMinimum": operator.le,
        "maximum": operator.gt,
        "exclusiveMaximum": operator.ge,
    }
    for key, is_beyond in compared.items():
        if key in schema and is_beyond(value, schema[key]):
            yield f"{name} is {value}, but its {key} is {schema[key]}"
    step = schema.get("multipleOf")
    if step and abs(value / step - round(value / step)) > 1e-9:
        yield f"{name} is {value}, which is not a multiple of {step}"


def _of_array(value: list[Any], schema: Schema, root: Schema, at: str, depth: int) -> Iterator[str]:
    name = at or "the value"
    if len(value) < schema.get("minItems", 0):
        yield f"{name} has fewer than {schema['minItems']} items"
    if len(value) > schema.get("maxItems", math.inf):
        yield f"{name} has more than {schema['maxItems']} items"
    if schema.get("uniqueItems") and len({json.dumps(v, sort_keys=True) for v in value}) < len(
        value
    ):
        yield f"{name} has an item twice"
    items = schema.get("items", True)
    first = schema.get("prefixItems", items if isinstance(items, list) else [])
    for i, one in enumerate(value):
        inner = first[i] if i < len(first) else True if isinstance(items, list) else items
        yield from _violations(one, inner, root, f"{at}[{i}]", depth + 1)


def _of_object(
    value: dict[str, Any], schema: Schema, root: Schema, at: str, depth: int
) -> Iterator[str]:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{at or 'the value'} lacks {name!r}"
    patterns = schema.get("patternProperties", {})
    for key, one in value.items():
        place = f"{at}.{key}" if at else key
        inner = [properties[key]] if key in properties else []
        inner += [found for pattern, found in patterns.items() if matches(pattern, key)]
        for found in inner or [schema.get("additionalProperties", True)]:
            yield from _violations(one, found, root, place, depth + 1)
