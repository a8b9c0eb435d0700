"""Fill ``vendor/llama.cpp`` with the sources that ``llama.cpp.lock`` pins.

Standard library only: the build runs this with whatever Python it has. ``pip``
downloads the pinned source distribution and checks its hash; the parts that the
build needs are unpacked. A stamp beside them holds the text of the lock and the names
of these parts, so an equal stamp means that nothing has to be done and no network is needed.

Usage: ``python vendor/fetch.py [--force]``
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOCK = HERE / "llama.cpp.lock"
TARGET = HERE / "llama.cpp"
STAMP = ".pykvcache-lock"

# Python 3.10.0 to 3.10.11 lack tar filters; check_member stands alone there.
TAR_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}

# 38 of 176 MB: what CMake reads for the library itself and for common/, and the licences.
WANTED = {"CMakeLists.txt", "LICENSE", "licenses"}
WANTED |= {"cmake", "common", "ggml", "include", "src", "vendor"}

# And 0.5 MB that the tests read: chat templates of known models.
WANTED_BELOW = {("models", "templates")}


class FetchError(Exception):
    """The sources cannot be had; the message is one line for the user."""


def stamp_text(lock: str) -> str:
    """Return what the stamp holds."""
    return lock + " ".join(sorted(WANTED)) + "\n"


def is_current(target: Path, lock: str) -> bool:
    """Tell whether ``target`` was unpacked from this very lock, with all that is wanted now."""
    stamp = target / STAMP
    return stamp.is_file() and stamp.read_text() == stamp_text(lock)


def download(lock: Path, folder: Path) -> Path:
    """Download the locked source distribution into ``folder`` and return its path."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-binary=:all:", "--no-build-isolation", "--require-hashes"),
        *("-r", str(lock), "-d", str(folder)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FetchError(explain(done.stderr))
    found = sorted(folder.glob("*.tar.gz"))
    if len(found) != 1:
        raise FetchError(f"pip left {len(found)} archives where one was expected")
    return found[0]


def explain(stderr: str) -> str:
    """Turn what pip wrote into one line."""
    if "No module named pip" in stderr:
        return "pip is missing from this Python: run 'python -m ensurepip' first"
    if "DO NOT MATCH THE HASHES" in stderr or "hash" in stderr.lower():
        return (
            "the downloaded llama.cpp sources do not match the hash in vendor/llama.cpp.lock: "
            "they were changed in transit or the lock is wrong"
        )
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["pip said nothing"])[-1]
    return (
        "cannot download the llama.cpp sources (no network?); put them into vendor/llama.cpp "
        f"or set LLAMA_CPP_SOURCE_DIR. pip: {last}"
    )


def wanted_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members the build needs, with paths relative to llama.cpp's root."""
    for member in archive:
        parts = Path(member.name).parts
        # <sdist name>/vendor/llama.cpp/<wanted>/...
        if len(parts) <= 3 or parts[1:3] != ("vendor", "llama.cpp"):
            continue
        if parts[3] in WANTED or parts[3:5] in WANTED_BELOW:
            yield member.replace(name="/".join(parts[3:]), deep=False)


def unpack(sdist: Path, target: Path, lock: str) -> None:
    """Unpack into a sibling folder first, so that a half-written one is never used."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with tarfile.open(sdist) as archive:
        for member in wanted_members(archive):
            archive.extract(member, partial, **TAR_FILTER)
    if not (partial / "include" / "llama.h").is_file():
        raise FetchError(f"{sdist.name} holds no llama.cpp sources at vendor/llama.cpp")
    (partial / STAMP).write_text(stamp_text(lock))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def fetch(*, force: bool = False, lock: Path = LOCK, target: Path = TARGET) -> Path:
    """Make ``target`` hold the pinned sources and return it."""
    text = lock.read_text()
    if not force and is_current(target, text):
        return target
    with tempfile.TemporaryDirectory(prefix="pykvcache-fetch-") as folder:
        unpack(download(lock, Path(folder)), target, text)
    return target


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description="fetch the pinned llama.cpp sources")
    parser.add_argument("--force", action="store_true", help="fetch even if the stamp is current")
    try:
        print(fetch(force=parser.parse_args().force))
    except (FetchError, OSError, tarfile.TarError) as error:
        print(f"pykvcache: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
