"""The layers of docs/architecture.md, read from the imports: they point down only."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pykvcache"

# Lowest first. A module imports from lines below its own only; a name may be a file or a folder,
# and inside a folder anything goes. A new module needs a place here, and a reason for it.
LAYERS = [
    {"errors", "enums", "_closing", "_ranges"},
    {"_arguments", "_drawing"},
    {"_native", "arrays", "prefix/stores"},
    {"batch", "_grammar", "_json_pattern", "chat"},
    {"_json_schema"},
    {"chat_format"},
    {"_model_file", "_devices"},
    {"adapters"},
    {"model"},
    {"sampling", "_params", "state"},
    {"kv"},
    {"memory", "introspection"},
    {"decoding", "pictures"},
    {"context"},
    {"sequence", "_embedder"},
    {"prefix"},
    {"generate", "simulate", "openai_format"},
    {"llm"},
    {"__init__"},
    {"serve"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
# Folders inside a unit that have a place of their own.
INNER = {"prefix/stores"}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Beyond the table: what may be imported at all, by those that promise less.
ONLY = {
    "errors": set(),
    "_drawing": {"errors"},
    "enums": set(),
    "_arguments": {"errors"},
    "_ranges": set(),
    "_closing": set(),
    "arrays": {"errors", "_arguments"},
    "_native": {"errors", "_arguments"},
    "prefix/stores": {"errors", "_arguments"},
    "simulate": {"errors", "_arguments", "_drawing", "_native", "prefix"},
}
# What of the prefix cache works without the compiled layer: a folder or file each, which imports
# errors and others of these.
MODEL_FREE = {
    "block_hash",
    "events",
    "node",
    "policies",
    "tree",
}
# Outside the standard library. Whatever is not NumPy is an extra: imported where it is used.
REQUIRED = {"numpy"}
EXTRAS = {
    "arrays": {"safetensors"},
    "_drawing": {"matplotlib"},
    "generate": {"rich"},
    "prefix": {"zmq", "msgpack", "prometheus_client"},
    "prefix/stores": {"xxhash", "cryptography", "redis", "obstore"},
    "state": {"xxhash"},
}
# Units that cannot be imported without an extra: others import them where they are used.
NEEDS_EXTRA = {
    "chat": {"jinja2"},
    "cli": {"click"},
    "demo": {"click"},
    "serve": {"starlette", "anyio", "uvicorn", "msgspec", "prometheus_client"},
}


def unit(path: Path) -> str:
    """The name in the table that a file of the package belongs to."""
    parts = path.relative_to(PACKAGE).parts
    inner = "/".join(parts[:2])
    return inner if inner in INNER else parts[0].removesuffix(".py")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(tree: ast.AST, *, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield (dotted module, inside a function?), without what only type checkers run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            if node.module == "pykvcache":
                yield from ((f"pykvcache.{alias.name}", lazy) for alias in node.names)
            else:
                yield node.module, lazy
        elif is_type_checking(node):
            assert isinstance(node, ast.If)
            for branch in node.orelse:
                yield from imports(ast.Module([branch], []), lazy=lazy)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(node, lazy=lazy or inside)


def cython_imports(text: str) -> Iterator[str]:
    """Yield the modules of ours that Cython text imports or cimports."""
    for line in text.splitlines():
        found = re.match(r"\s*(?:from\s+([\w.]+)\s+c?import|c?import\s+([\w.]+))", line)
        if found and (name := found[1] or found[2]).startswith("pykvcache"):
            yield name


PYTHON = sorted(PACKAGE.rglob("*.py"))
CYTHON = sorted(p for p in PACKAGE.rglob("*.*") if p.suffix in {".pyx", ".pxi", ".pxd"})


def ours(name: str) -> str | None:
    """Return the unit of the package that a dotted name lies in, None for other packages."""
    head, _, rest = name.partition(".")
    if head != "pykvcache":
        return None
    inner = "/".join(rest.split(".")[:2])
    if inner in INNER:
        return inner
    return rest.partition(".")[0] if rest else "__init__"


@functools.cache
def imports_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """Return what `imports` yields of a file, which several tests ask for."""
    return tuple(imports(ast.parse(path.read_text())))


def test_imports_point_down() -> None:
    for path in PYTHON:
        here = unit(path)
        assert here in LEVEL, f"{here} has no place in LAYERS"
        for name, lazy in imports_of(path):
            there = ours(name)
            if there is None or there == here:
                continue
            if there not in LEVEL:  # a name that pykvcache itself exports
                there = "__init__"
            below = LEVEL[there] < LEVEL[here]
            # The package's own path is all that a function may ask of what is above it.
            assert below or (lazy and name == "pykvcache"), f"{here} imports {name}"
            assert there in ONLY.get(here, {there}), f"{here} may not import {name}"


def test_what_is_needed_is_numpy() -> None:
    for path in PYTHON:
        here = unit(path)
        for name, lazy in imports_of(path):
            head = name.partition(".")[0]
            if ours(name) in NEEDS_EXTRA and ours(name) != here:
                assert lazy, f"{here} needs {name} to be imported at all"
            if head in sys.stdlib_module_names or head == "pykvcache" or head in REQUIRED:
                continue
            if head in NEEDS_EXTRA.get(here, set()):
                continue
            assert head in EXTRAS.get(here, set()), f"{here} imports {name}"
            assert lazy, f"{here} needs {name} to be imported at all"


def part(name: str) -> str | None:
    """Return which part of the prefix cache a dotted name lies in."""
    return name.removeprefix("pykvcache.prefix").strip(".").partition(".")[0] or None


def test_the_tree_and_the_simulator_need_no_model() -> None:
    for path in PYTHON:
        inside = path.relative_to(PACKAGE).with_suffix("").parts
        if inside[0] != "simulate" and not (inside[0] == "prefix" and inside[1] in MODEL_FREE):
            continue
        for name, _ in imports_of(path):
            if ours(name) == "prefix":
                assert part(name) in MODEL_FREE, f"{path.name} imports {name}"
            else:
                assert ours(name) in {
                    None,
                    "errors",
                    "_arguments",
                    "_drawing",
                    "_ranges",
                    inside[0],
                }, f"{path.name} imports {name}"


def test_the_compiled_layer_needs_errors_alone() -> None:
    for path in CYTHON:
        assert unit(path) == "_native", "C is met in _native alone"
        for name in cython_imports(path.read_text()):
            assert ours(name) in {"_native", *ONLY["_native"]}, f"{path.name} imports {name}"


FAMILIES = ("mlx", "ollama")


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_array_caches_share_no_module(family: str) -> None:
    (other,) = set(FAMILIES) - {family}
    paths = sorted((PACKAGE / "arrays" / family).glob("*.py"))
    assert len(paths) > 5
    for path in paths:
        for name, _ in imports_of(path):
            assert not name.startswith(f"pykvcache.arrays.{other}"), f"{path.name} imports {name}"


def test_c_names_have_one_alias() -> None:
    """A line with ``lib.`` is C, in every file of the compiled layer."""
    text = "\n".join(p.read_text() for p in CYTHON if p.suffix != ".pxd")
    taken = re.findall(r"^.*cimport.*lib(?:llama|pykv).*$", text, re.MULTILINE)
    assert taken == ["from pykvcache._native cimport libpykv as lib"]


def test_private_headers_are_read_by_the_probe_alone() -> None:
    private = re.compile(r'#include\s+"(llama-[\w-]+\.h)"')
    files = (p for p in (PACKAGE / "_native").rglob("*.*") if p.suffix in {".h", ".cpp"})
    assert {p.parent.name for p in files if private.search(p.read_text())} == {"probe"}


def every_import(tree: ast.AST, module: str, known: set[str]) -> set[str]:
    """Return the known modules that one imports, in functions too; types alone make no circle."""
    found = set()
    typing_only = {
        id(inner) for node in ast.walk(tree) if is_type_checking(node) for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            # A folder's __init__ is imported for what it holds itself, not for its modules.
            found |= (names & known) if names <= known else {node.module, *names}
    return (found & known) - {module}


def modules(folder: Path, root: Path) -> dict[str, Path]:
    """Return the modules below a folder by their dotted names, which begin at root."""
    found = {}
    for path in folder.rglob("*.py"):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle; empty if there are none."""
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


TRAINING = ROOT / "models" / "training"


@pytest.mark.parametrize(
    ("folder", "root"),
    [(PACKAGE, PACKAGE.parent), (ROOT / "benchmarks", ROOT), (TRAINING, TRAINING)],
    ids=["pykvcache", "benchmarks", "training"],
)
def test_no_imports_go_in_circles(folder: Path, root: Path) -> None:
    found = modules(folder, root)
    graph = {
        name: every_import(ast.parse(path.read_text()), name, set(found))
        for name, path in found.items()
    }
    assert any(graph.values())
    assert circle(graph) == []
