"""What documents say is true: code and its output, names, files, links, layers and hazards."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import pykvcache
from hazards import PAGE, listed_ids, marked_tests, page
from pykvcache.memory import KvCacheMethods
from pykvcache.prefix import stores
from pykvcache.prefix.policies import POLICIES
from pykvcache.sampling import STAGES
from support.doc_blocks import agrees, outputs, read_blocks

STORES = [name for name in stores.__all__ if name != "BlockStore" and name.endswith("Store")]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "pykvcache"
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPERATIONS = (DOCS / "reference" / "operations.md").read_text(encoding="utf-8")
ARCHITECTURE = (DOCS / "architecture.md").read_text(encoding="utf-8")
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
        text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
        for path in re.findall(r"`((?:\w+/)+[\w.]+\.(?:py|md|cpp|h|txt|cmake|map))`", text):
            if path.startswith("vendor/llama.cpp"):
                continue  # fetched
            places = [ROOT, ROOT / "src", PACKAGE, PACKAGE / "_native", ROOT / "tests"]
            assert any((place / path).is_file() for place in places), f"{name}: {path}"


def test_files_and_functions_of_the_compiled_layer_exist() -> None:
    page = (DOCS / "reference" / "compiled-layer.md").read_text(encoding="utf-8")
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
    pictures = [path.name for path in (DOCS / "pictures").iterdir()]
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
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
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
    table = (DOCS / "concepts" / "kinds.md").read_text(encoding="utf-8")
    assert "sliding-window" in kinds
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.M)) == kinds


@pytest.mark.parametrize(
    ("page", "names"),
    [("policies.md", POLICIES), ("how-to/sampling.md", STAGES), ("stores.md", STORES)],
)
def test_every_policy_stage_and_store_has_a_row(page: str, names: Iterable[str]) -> None:
    table = (DOCS / page).read_text(encoding="utf-8")
    assert set(re.findall(r'^\| `"?([\w-]+)["`(]', table, re.M)) >= set(names)


# Code ---------------------------------------------------------------------------------------------

WITH_CODE = [p for p in sorted(DOCS.rglob("*.md")) if read_blocks(p.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", WITH_CODE, ids=lambda p: p.relative_to(DOCS).as_posix())
def test_code_prints_what_the_document_says(path: Path) -> None:
    blocks = read_blocks(path.read_text(encoding="utf-8"))
    for block, output in zip(blocks, outputs(blocks), strict=True):
        assert agrees(block, output), f"{path}: {block.code}\nprints\n{output}"


def test_the_tutorial_shows_output() -> None:
    blocks = read_blocks((DOCS / "tutorial.md").read_text(encoding="utf-8"))
    assert len([block for block in blocks if block.output]) >= 6


def test_the_first_screen_has_code_with_its_output() -> None:
    blocks = read_blocks(README)
    for block, output in zip(blocks, outputs(blocks), strict=True):
        assert len(block.code.splitlines()) <= 11
        assert block.output
        assert agrees(block, output), output


# README.md and the table of operations ------------------------------------------------------------


def table_methods() -> set[str]:
    """Names of the first column of the table of operations."""
    rows = re.findall(r"^\| (`.+?) \|", OPERATIONS, re.M)
    return {name for row in rows for name in re.findall(r"`(\w+)", row)}


def test_methods_of_the_table_exist() -> None:
    assert table_methods()
    for name in table_methods():
        assert hasattr(pykvcache.LlamaContext, name), name


def test_no_memory_method_is_left_out() -> None:
    methods = {name for name, value in vars(KvCacheMethods).items() if callable(value)}
    assert {name for name in methods if not name.startswith("_")} <= table_methods()


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^    make (\w+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_errors_that_are_named_exist() -> None:
    for name in re.findall(r"`(\w+(?:Error|TooLarge|Slot))`", README + OPERATIONS):
        assert hasattr(pykvcache.errors, name) or name == "TypeError", name


def test_position_queries_answer_where_other_methods_raise() -> None:
    """The sentence on sequence ids, for each method of the table that takes one."""
    assert "`SequenceIdError`, but the two position queries answer -1" in OPERATIONS
    path = pykvcache.embedded_model_path()
    with pykvcache.LlamaModel(path) as model, pykvcache.LlamaContext(model, n_ctx=64) as ctx:
        assert ctx.kv_cache_seq_pos_min(99) == ctx.kv_cache_seq_pos_max(99) == -1
        more = {"clear_kv_cache_seq": (0, 1), "copy_kv_cache_seq": (0,), "copy_cache": (0, 1)}
        more |= {"copy_prefix": (0, 1), "kv_cache_seq_keep": (), "kv_cache_seq_add": (0, 1, 1)}
        more |= {"kv_cache_seq_div": (0, 1, 2), "remove": (0, 1), "can_resume": (0,)}
        more |= {"get_state": (), "state_size": (), "get_partial_state": (), "kv": ()}
        more |= {"sequence_state": ()}
        for name, rest in more.items():
            with pytest.raises(pykvcache.errors.SequenceIdError):
                getattr(ctx, name)(99, *rest)


# Hazards ------------------------------------------------------------------------------------------


def test_guarantees_and_markers_name_the_same_hazards() -> None:
    listed, marked = set(listed_ids()), set(marked_tests())
    assert sorted(listed - marked) == [], "without a test"
    assert sorted(marked - listed) == [], "not in docs/guarantees.md"


def test_the_page_of_hazards_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tests/hazards.py"
