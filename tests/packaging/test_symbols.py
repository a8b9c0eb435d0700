"""The extension shares a process with other llama.cpp bindings: it exports its init alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from pykvcache._native import lib

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF symbol tables")


def exported(path: Path) -> set[str]:
    """Names that the dynamic linker can bind other libraries to."""
    with path.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        return {
            symbol.name
            for symbol in table.iter_symbols()
            if symbol["st_shndx"] != "SHN_UNDEF"
            and symbol["st_info"]["bind"] in ("STB_GLOBAL", "STB_WEAK", "STB_LOOS")
            and symbol["st_other"]["visibility"] in ("STV_DEFAULT", "STV_PROTECTED")
        }


def test_only_the_init_function_is_exported() -> None:
    assert exported(Path(lib.__file__)) == {"PyInit_lib"}


def test_compute_threads_are_its_own() -> None:
    """libgomp would end the process where the system gives no thread."""
    with Path(lib.__file__).open("rb") as file:
        elf = ELFFile(file)
        table = elf.get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        foreign = {
            symbol.name
            for symbol in table.iter_symbols()
            if symbol.name.startswith(("GOMP_", "omp_", "__kmpc"))
        }
        dynamic = elf.get_section_by_name(".dynamic")
        assert isinstance(dynamic, DynamicSection)
        needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}  # type: ignore[attr-defined]
    assert not foreign
    assert not [name for name in needed if "omp" in name]
