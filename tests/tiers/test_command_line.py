"""``pykvcache cache``: on a folder and on a server, while other processes use them."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
from pathlib import Path

import pytest

from pykvcache.cli import main
from pykvcache.prefix.stores import (
    Envelope,
    FolderStore,
    MemoryStore,
    RedisStore,
    Rejection,
    SealedStore,
    open_store,
    tools,
)
from stores.servers import PATIENT, freeze, redis_server

ENVELOPE = Envelope(model="m", layout="l")
SECRET = "0123456789abcdef"


def blocks(n: int, size: int = 5000) -> list[tuple[bytes, bytes]]:
    return [(bytes([i]) * 32, bytes([i]) * size) for i in range(n)]


def test_a_folder_is_listed_counted_checked_trimmed_and_cleared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(tmp_path)
    with SealedStore(FolderStore(where), ENVELOPE) as store:
        store.put(blocks(30))
        assert main(["cache", "du", where]) == 0
        assert "30" in capsys.readouterr().out
        assert main(["cache", "ls", where, "-n", "5", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)) == 5
        assert main(["cache", "ls", where]) == 0
        assert "and 10 more" in capsys.readouterr().out
        assert main(["cache", "verify", where]) == 0
        assert "30 blocks are intact" in capsys.readouterr().out
        path = next(tmp_path.glob("blocks/03/*"))
        data = bytearray(path.read_bytes())
        data[300] ^= 1
        path.write_bytes(data)
        other = next(tmp_path.glob("blocks/04/*"))
        other.write_bytes(other.read_bytes()[:-1])
        next(tmp_path.glob("blocks/05/*")).write_bytes(
            next(tmp_path.glob("blocks/06/*")).read_bytes()
        )
        assert main(["cache", "verify", where, "--remove"]) == 1
        out = capsys.readouterr().out
        assert out.count("damaged, removed") == out.count("truncated, removed") == 1
        assert "foreign, removed" in out
        assert main(["cache", "verify", where]) == 0
        assert main(["cache", "trim", where, "2M"]) == 0
        capsys.readouterr()
        assert main(["cache", "du", where, "--json"]) == 0
        assert 0 < json.loads(capsys.readouterr().out)["n_bytes"] <= 2 << 20
        assert main(["cache", "clear", where, "--yes"]) == 0
        assert store.contains([bytes(32)]) == 0


def test_with_a_secret_blocks_are_checked_by_who_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    with SealedStore(
        FolderStore(tmp_path), Envelope(model="m", layout="l", secret=SECRET)
    ) as store:
        store.put(blocks(3))
    assert main(["cache", "verify", str(tmp_path)]) == 0
    assert "3 cannot be checked" in capsys.readouterr().out
    monkeypatch.setenv("PYKVCACHE_SECRET", SECRET)
    assert main(["cache", "verify", str(tmp_path)]) == 0
    assert "3 blocks are intact" in capsys.readouterr().out
    with FolderStore(tmp_path) as plain:
        assert {why for _, why in tools.verify(plain, SECRET[::-1])} == {Rejection.FORGED}


def test_what_is_no_store_is_refused_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file, none = (str(tmp_path / name) for name in ("folder", "text.txt", "none"))
    (tmp_path / "folder" / "blocks").mkdir(parents=True)
    (tmp_path / "text.txt").write_text("not a cache")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for words, codes, said in (
        (["du", none], (1, 2), "none"),
        (["du", str(tmp_path)], (1, 2), ""),
        (["du", "nothing://x"], (1, 2), "nothing"),
        (["ls", file], (1,), "this is a file"),
        (["clear", folder], (2,), "--yes"),  # nobody can be asked
        (["trim", folder, "much"], (2,), "much"),
    ):
        assert main(["cache", *words]) in codes
        error = capsys.readouterr().err
        assert error
        assert said in error
    assert len(list(tmp_path.iterdir())) == 2


class OneFile(MemoryStore):
    schemes = frozenset({"onefile"})

    def __init__(self, address: str) -> None:
        super().__init__()
        Path(address.partition("://")[2]).touch()

    @classmethod
    def exists(cls, address: str) -> bool:
        return Path(address.partition("://")[2]).exists()


@pytest.mark.parametrize("scheme", ["onefile", "file"])
def test_a_store_that_an_address_names_is_not_made(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if scheme == "file":
        pytest.importorskip("obstore", reason="pip install '.[obstore]'")
    where = f"{scheme}://{tmp_path}/a%20place"
    for command in (["ls"], ["du"], ["verify"], ["trim", "0"], ["clear", "--yes"]):
        assert main(["cache", command[0], where, *command[1:]]) == 1, command
        assert "no such store" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
    open_store(where).close()
    assert list(tmp_path.iterdir())
    assert main(["cache", "du", where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_blocks"] == 0


def test_a_server_that_does_not_answer_is_not_an_empty_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("redis", reason="pip install '.[redis]'")
    for command in (["ls"], ["du"], ["verify"], ["clear", "--yes"]):
        assert main(["cache", *command, "redis://:secret@127.0.0.1:1/0"]) == 1, command
        said = capsys.readouterr().err
        assert "did not answer" in said
        assert "refused" in said, "the cause"
        assert "secret" not in said


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_server_that_is_slow_is_not_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers after twice as long as a request waits for it."""
    with redis_server(tmp_path) as server:
        with SealedStore(RedisStore(server.url, **PATIENT), ENVELOPE) as store:
            store.put(blocks(5))
        assert main(["cache", "verify", server.url]) == 0
        assert "5 blocks are intact" in capsys.readouterr().out
        freeze(server.process)
        later = threading.Timer(1.5, lambda: server.process.send_signal(signal.SIGCONT))
        later.start()
        assert main(["cache", "du", server.url, "--json"]) == 0
        later.join()
        assert json.loads(capsys.readouterr().out)["n_blocks"] == 5
        assert main(["cache", "clear", "-y", server.url]) == 0
        assert main(["cache", "du", server.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out.split("removed")[-1])["n_blocks"] == 0
