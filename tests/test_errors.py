"""What exceptions have in common: a builtin beside each, facts as attributes, whole pickles."""

from __future__ import annotations

import ast
import copy
import pickle
from pathlib import Path

import pytest

from pykvcache import errors

FACTS: list[errors.KvCacheError] = [
    errors.SeqIdTooLarge(2**40),
    errors.UnsupportedOperation("decode", "no"),
    errors.SequenceIdError(9, 8),
    errors.PositionError("far", 1, 2, value=3, limit=4),
    errors.KvCacheFull("full", capacity=4, batch=5),
    errors.ReprocessInputs([1, 2]),
    errors.DecodeError("failed", -3, n_decoded=7, needs_removal=(1, 2)),
    errors.NoKvCacheSlot("full", 1, n_decoded=7, n_tokens=9, n_free=2, n_cells=256),
    errors.DecodeAborted("stopped", 2, n_decoded=7),
    errors.PartialStateError("changed", 3, 41),
    errors.StoreError("short", value=3, limit=16),
    errors.OutputNotFinite("bad", "logits", 3, 7, -float("inf"), n_decoded=2),
    errors.InvalidBatch("bad", index=3, value=99, limit=98),
    errors.StateError("other", what="type_k", value="f16", limit="f32"),
    errors.StateTruncated("short", what="bytes", value=9, limit=99),
    errors.ContextCreateError("few", "n_batch", 4, 9),
    errors.ModelLoadError.of("a.gguf", "it is not a GGUF file"),
    errors.ModelLoadError(2, "cannot load model: No such file or directory", "a.gguf"),
]


@pytest.mark.parametrize("error", FACTS, ids=repr)
def test_facts_are_attributes_and_survive_a_pickle(error: errors.KvCacheError) -> None:
    facts = vars(error)
    assert facts
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == facts


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n != "KvCacheError"])
def test_every_error_is_a_builtin_too(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.KvCacheError)
    builtins = [c for c in kind.__mro__ if c.__module__ == "builtins"]
    assert builtins[0] is not Exception


@pytest.mark.parametrize(
    ("base", "names"),
    [
        ("CacheFullError", {"KvCacheFull", "NoKvCacheSlot", "NoSlot"}),
        ("UnsupportedError", {"NotSupported", "UnsupportedOperation"}),
    ],
)
def test_errors_of_one_meaning_have_a_common_base(base: str, names: set[str]) -> None:
    kind = getattr(errors, base)
    found = {n for n in errors.__all__ if n != base and issubclass(getattr(errors, n), kind)}
    assert found == names


def test_what_is_wrong_with_a_state_is_always_an_attribute() -> None:
    wanted = ("StateDamaged", "StateTruncated", "StateTrailingBytes", "StateVersionError")
    for path in Path(errors.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in wanted:
                named = {keyword.arg for keyword in node.keywords}
                assert named & {"what", None}, f"{path.name}:{node.lineno}"


PACKAGE = Path(errors.__file__).parents[1]
# What stands in these texts is a name, another error or a path, and not a number that is off.
NAMES_ONLY = {"_fingerprint.py", "_grammar.py", "cli/talk.py"}


def numbers_in_texts(path: Path) -> list[str]:
    """Errors of ours that are raised with something in their text, and with no fact."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        call = node.exc if isinstance(node, ast.Raise) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        kind = getattr(errors, call.func.id, None)
        if not isinstance(kind, type) or len(call.args) != 1 or call.keywords:
            continue
        text = call.args[0]
        values = text.values if isinstance(text, ast.JoinedStr) else []
        if any(isinstance(value, ast.FormattedValue) for value in values):
            found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(text)}")
    return found


def test_what_a_text_says_is_an_attribute_too() -> None:
    """Of every error of the binding; those of the array caches are plain ValueErrors."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith(("arrays/", "errors/", "kv/bridge")) or place in NAMES_ONLY:
            continue
        found += [one for one in numbers_in_texts(path) if "native.memory_kind" not in one]
    assert [one for one in found if "extended positions (M-RoPE)" not in one] == []
