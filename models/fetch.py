"""Download the real models that the integration tests run on. Needs Python and nothing else.

Usage: python models/fetch.py [--list] [--folder DIR] [NAME ...]

Without names all are fetched. They go to $PYKVCACHE_MODELS, or to models/real/. What was
interrupted goes on where it stopped; a file gets its name only when size and SHA-256 are right.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 20
TIMEOUT = 30.0


@dataclass(frozen=True)
class Remote:
    """A file at one revision of a repository on the Hugging Face hub."""

    name: str
    repo: str
    revision: str
    file: str
    size: int
    sha256: str
    licence: str
    memory: str

    @property
    def url(self) -> str:
        """Where it is; HF_ENDPOINT names a mirror, as for the hub's own tools."""
        hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        return f"{hub.rstrip('/')}/{self.repo}/resolve/{self.revision}/{self.file}"


MODELS = (
    Remote(
        "smollm2",
        "bartowski/SmolLM2-135M-Instruct-GGUF",
        "09816acd5d99df7be770d85ea30822623dab342c",
        "SmolLM2-135M-Instruct-Q4_K_M.gguf",
        105_454_432,
        "2e8040ceae7815abe0dcb3540b9995eaa1fa0d2ca9e797d0a635ae4433c68c2d",
        "Apache-2.0",
        "plain attention",
    ),
    Remote(
        "gemma3",
        "ggml-org/gemma-3-270m-it-GGUF",
        "e7647be17ae1108f2f605ed061ca0608b171afff",
        "gemma-3-270m-it-Q8_0.gguf",
        291_545_600,
        "0ef57d2c838458a1952664260dcba38e5bdda37494f3af732f06e4add24068e3",
        "Gemma Terms of Use",
        "sliding window",
    ),
    Remote(
        "lfm2",
        "LiquidAI/LFM2-350M-GGUF",
        "8fdc9d526b7ed346b19257551b05816c7912ecc2",
        "LFM2-350M-Q4_K_M.gguf",
        229_309_376,
        "a4d000c7064bd3b2e42c6845836286a899a4e79cf1791da1a6797b58d575957d",
        "LFM Open License 1.0",
        "hybrid",
    ),
    Remote(
        "minilm",
        "second-state/All-MiniLM-L6-v2-Embedding-GGUF",
        "544f204f2eaa2d71361ffc74d6df7170285b286a",
        "all-MiniLM-L6-v2-Q8_0.gguf",
        25_008_064,
        "263215c3cadd6e16740741a7624ab4cbb6c8e777688bd5331ecfbf5681c2f8ed",
        "Apache-2.0",
        "none: embeddings",
    ),
)


class FetchError(Exception):
    """A download that failed; the message is one line."""


def default_folder() -> Path:
    """Return the folder that the tests look into."""
    given = os.environ.get("PYKVCACHE_MODELS")
    return Path(given) if given else Path(__file__).resolve().parent / "real"


def megabytes(size: int) -> str:
    """Write a size for people."""
    return f"{size / 1e6:.1f} MB"


def fetch(model: Remote, folder: Path) -> Path:
    """Download a model unless it is there.

    Raises
    ------
    FetchError
        It could not be downloaded. What has arrived stays in ``FILE.part``, unless it is wrong.
    """
    path = folder / model.file
    if path.exists():
        if path.stat().st_size != model.size:
            raise FetchError(f"{path} has not the size of {model.name}: delete it first")
        print(f"{model.name}: {path} is there")
        return path
    part = path.with_name(path.name + ".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        have = _usable(part, model.size)
        free = shutil.disk_usage(folder).free
        if free < model.size - have:
            raise FetchError(f"{folder} has {megabytes(free)} free: {megabytes(model.size)} wanted")
        if have < model.size:
            _download(model, part, have)
        _verify(model, part)
        os.replace(part, path)
    except OSError as error:
        raise FetchError(f"cannot write {part}: {error.strerror or error}") from None
    print(f"{model.name}: {path}, {megabytes(model.size)}, SHA-256 is right")
    return path


def _usable(part: Path, size: int) -> int:
    """Return how much an earlier attempt left; what is too long is dropped."""
    have = part.stat().st_size if part.exists() else 0
    if have > size:
        part.unlink()
        return 0
    return have


def _download(model: Remote, part: Path, have: int) -> None:
    request = urllib.request.Request(model.url, headers={"User-Agent": "pykvcache-fetch"})
    why: Exception | None = None
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            # A server that ignores the range sends everything again.
            resumed = answer.status == http.HTTPStatus.PARTIAL_CONTENT and have > 0
            got = _receive(model, answer, part, have if resumed else 0)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink(missing_ok=True)
            raise FetchError(
                f"{model.name}: the server has less than was downloaded before; run it again"
            ) from None
        raise FetchError(f"{model.name}: {model.url} says {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise FetchError(f"{model.name}: cannot reach {model.url}: {error.reason}") from None
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        got, why = part.stat().st_size if part.exists() else 0, error
    if got != model.size:
        reason = f" ({type(why).__name__})" if why else ""
        raise FetchError(
            f"{model.name}: the connection ended after {megabytes(got)} of "
            f"{megabytes(model.size)}{reason}; run it again to go on from there"
        )


def _receive(model: Remote, answer: http.client.HTTPResponse, part: Path, have: int) -> int:
    """Append what arrives to the partial file; return how long it then is."""
    shown = 0.0
    print(f"{model.name}: {model.url}, {megabytes(model.size)}, from {megabytes(have)} on")
    with part.open("ab" if have else "wb") as file:
        while chunk := answer.read1(CHUNK):
            have += len(chunk)
            if have > model.size:
                raise FetchError(f"{model.name}: the server sends more than {model.size} bytes")
            file.write(chunk)
            if sys.stdout.isatty() and time.monotonic() - shown > 0.2:
                shown = time.monotonic()
                print(f"\r  {megabytes(have)} of {megabytes(model.size)}", end="", flush=True)
    if sys.stdout.isatty():
        print("\r\033[K", end="")
    return have


def _verify(model: Remote, part: Path) -> None:
    digest = hashlib.sha256()
    with part.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != model.sha256:
        part.unlink()
        raise FetchError(
            f"{model.name}: SHA-256 is {digest.hexdigest()}, not {model.sha256}; "
            "the download was deleted"
        )


def main(argv: Sequence[str] | None = None, models: Sequence[Remote] = MODELS) -> int:
    """Run the command line; 0, or 1 after a failure told in one line."""
    known = {model.name: model for model in models}
    parser = argparse.ArgumentParser(prog="fetch.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(known)}")
    parser.add_argument("--folder", type=Path, help="default: $PYKVCACHE_MODELS or models/real")
    parser.add_argument("--list", action="store_true", help="list the models and stop")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in known]
    if unknown:
        print(f"fetch.py: no model {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    if options.list:
        for model in models:
            size = megabytes(model.size).rjust(9)
            print(f"{model.name:8} {size}  {model.memory:16} {model.licence:21} {model.repo}")
        return 0
    try:
        for name in options.names or known:
            fetch(known[name], options.folder or default_folder())
    except FetchError as error:
        print(f"fetch.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nfetch.py: stopped; run it again to go on from there", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
