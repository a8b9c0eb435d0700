"""Files and messages named in documents exist, and modules are in the layers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from pykvcache.prefix import stores
from pykvcache.prefix.policies import POLICIES
from pykvcache.sampling import STAGES

STORES = [name for name in stores.__all__ if name != "BlockStore" and name.endswith("Store")]

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pykvcache"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]


def test_every_module_is_in_the_layers() -> None:
    block = ARCHITECTURE.split("## Layers")[1].split("```")[1]
    units = {p.name for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    units -= {"__init__.py", "__main__.py", "cli"}
    missing = [
        name for name in units if not re.search(rf"(?<!\w){name.removesuffix('.py')}\b", block)
    ]
    assert sorted(missing) == []


def test_files_named_with_a_folder_exist() -> None:
    for name in ("architecture", "building", "decisions", "reference/compiled-layer"):
        text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        for path in re.findall(r"`((?:\w+/)+[\w.]+\.(?:py|md|cpp|h|txt|cmake|map))`", text):
            if path.startswith("vendor/llama.cpp"):
                continue  # fetched
            places = [ROOT, ROOT / "src", PACKAGE, PACKAGE / "_native", ROOT / "tests"]
            assert any((place / path).is_file() for place in places), f"{name}: {path}"


def test_files_and_functions_of_the_compiled_layer_exist() -> None:
    page = (ROOT / "docs" / "reference" / "compiled-layer.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`([\w/]+\.(?:pxi|pxd|pyx|py|h|cpp|cmake|\*))`", page))
    files -= {"llama.h", "unicode.cpp"}  # llama.cpp's
    assert len(files) > 50
    for name in files:
        assert list(PACKAGE.rglob(name)), name
    found = {path for name in files for path in PACKAGE.rglob(name)}
    endings = (".pxi", ".h", ".cpp", ".cmake")
    native = {path for path in (PACKAGE / "_native").rglob("*") if path.suffix in endings}
    assert sorted(native - found) == []
    functions = re.findall(r"`(?:\w+::)?(\w+)` in `([\w/.]+)`", page)
    assert len(functions) > 15
    for function, name in functions:
        texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob(name)]
        assert any(re.search(rf"\b{function}\(", text) for text in texts), (function, name)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/**/*.md"))
    pictures = [path.name for path in (ROOT / "docs" / "pictures").iterdir()]
    assert len(pictures) >= 4
    assert [name for name in pictures if f"pictures/{name})" not in pages] == []


def said_in(path: Path) -> list[str]:
    """Return the texts of a source file; ``...`` where a value stands."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        # Adjacent literals, whose values stand in braces.
        return [re.sub(r'"\s*f?"', "", re.sub(r"\{[^}\n]*\}", "...", text))]
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "..." for p in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_messages_of_the_troubleshooting_page_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    entries = re.findall(r"^\*\*`.*?(?=\n\n|\Z)", page, re.MULTILINE | re.DOTALL)
    quoted = [one for entry in entries for one in re.findall(r"\*\*`([^`]+)`", entry)]
    messages = [" ".join(one.split()) for one in quoted if " " in one]
    assert len(messages) > 25
    said = [
        text
        for path in sorted(PACKAGE.rglob("*"))
        if path.suffix in (".py", ".pxi")
        for text in said_in(path)
    ]
    for message in messages:
        fits = re.compile(r".{1,30}?".join(map(re.escape, message.split("..."))))
        assert any(fits.search(text) for text in said), message


def test_every_kind_of_memory_has_a_row() -> None:
    source = (PACKAGE / "enums.py").read_text(encoding="utf-8")
    listed = source.split("MemoryKind: TypeAlias")[1].split("#:")[0]
    kinds = set(re.findall(r'"([a-z-]+)"', listed))
    table = (ROOT / "docs" / "concepts" / "kinds.md").read_text(encoding="utf-8")
    assert "sliding-window" in kinds
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.M)) == kinds


@pytest.mark.parametrize(
    ("page", "names"),
    [("policies.md", POLICIES), ("how-to/sampling.md", STAGES), ("stores.md", STORES)],
)
def test_every_policy_stage_and_store_has_a_row(page: str, names: Iterable[str]) -> None:
    table = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert set(re.findall(r'^\| `"?([\w-]+)["`(]', table, re.M)) >= set(names)
