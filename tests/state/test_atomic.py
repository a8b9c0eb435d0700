"""A save is whole or has not happened: killed, without room, without permission, onto odd names."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memory.kit import Make
from pykvcache import SequenceState
from pykvcache.state import ContextState
from state.kit import WORDS, cells_of, next_logits

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and limits of POSIX")


@pytest.fixture
def two(make_context: Make, tmp_path: Path) -> tuple[SequenceState, SequenceState]:
    """States of different lengths."""
    ctx = make_context("llama")
    ctx.decode(WORDS[:60])
    state = ctx.sequence_state(0, WORDS[:60])
    return state[:20], state


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from pykvcache import SequenceState
states = [SequenceState.load(path) for path in sys.argv[1:3]]
known = {state.to_bytes() for state in states}
target = Path(sys.argv[3])
states[0].save(target)
rng = random.Random(1)
seen, left, turn = set(), 0, 0
# Until that many saves were killed while their files were being written.
while (left < 15 or len(seen) < 2) and turn < 5000:
    turn += 1
    child = os.fork()
    if child == 0:
        while True:
            for state in states[::-1]:
                state.save(target, sync=turn % 5 == 0)
    time.sleep(0.002 + rng.random() * 0.006)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert target.read_bytes() in known, turn
    seen.add(len(SequenceState.load(target)))
    # Any other file is the temporary file of the killed save.
    for path in target.parent.iterdir():
        if path != target:
            assert path.name.startswith(".state.") and path.suffix == ".tmp", path
            path.unlink()
            left += 1
print(sorted(seen), left)
"""


def test_kill_9_leaves_the_old_file_or_the_new_one(
    two: tuple[SequenceState, SequenceState], tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    for i, state in enumerate(two):
        state.save(tmp_path / str(i))
    names = (tmp_path / "0", tmp_path / "1", folder / "state")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *names], stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == "[20, 60] 15\n"


FULL = """
import resource, signal, sys
from pykvcache import SequenceState
from pykvcache.errors import StateFileError
state = SequenceState.load(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = len(state.to_bytes())
for room in (0, 1, 1000, 8192, size // 2, size - 1):
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    for sync in (True, False):
        try:
            state.save(sys.argv[2], sync=sync)
        except StateFileError as error:
            assert error.errno == 27, error
            assert error.filename == sys.argv[2]
        else:
            raise AssertionError(room)
resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
assert state.save(sys.argv[3]) == size
"""


@pytest.mark.hazard("S10")
def test_a_file_that_finds_no_room_leaves_the_old_one_and_nothing_else(
    two: tuple[SequenceState, SequenceState], tmp_path: Path
) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 0
    source, folder = tmp_path / "source", tmp_path / "folder"
    folder.mkdir()
    two[1].save(source)
    two[0].save(folder / "old")
    old = (folder / "old").read_bytes()
    subprocess.run([sys.executable, "-c", FULL, source, folder / "old", folder / "new"], check=True)
    assert (folder / "old").read_bytes() == old
    assert (folder / "new").read_bytes() == source.read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["new", "old"]


NOBODY = """
import os, sys
from pykvcache import SequenceState, describe_state
from pykvcache.errors import StateFileError
state = SequenceState.load(sys.argv[1], mapped=False)
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for call in (
    lambda: SequenceState.load(sys.argv[1]),
    lambda: SequenceState.load(sys.argv[1], mapped=False),
    lambda: describe_state(sys.argv[1]),
    lambda: state.save(sys.argv[2]),
    lambda: state.save(sys.argv[3]),
):
    try:
        call()
    except StateFileError as error:
        assert error.errno == 13, error
        assert error.filename in sys.argv
    else:
        raise AssertionError("permitted")
"""


def test_without_permission(two: tuple[SequenceState, SequenceState], tmp_path: Path) -> None:
    secret, closed = tmp_path / "secret", tmp_path / "closed"
    two[0].save(secret)
    closed.mkdir()
    two[0].save(closed / "old")
    old = (closed / "old").read_bytes()
    secret.chmod(0)
    closed.chmod(0o555)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == tmp_path.owner() and folder.stat().st_mode & 0o777 == 0o700:
            folder.chmod(0o711)
    if os.getuid() != 0:
        secret.chmod(0o400)
    code = (
        NOBODY if os.getuid() == 0 else NOBODY.replace("if os", "os.chmod(sys.argv[1], 0)\nif os")
    )
    subprocess.run([sys.executable, "-c", code, secret, closed / "old", closed / "new"], check=True)
    closed.chmod(0o755)
    assert (closed / "old").read_bytes() == old
    assert [path.name for path in closed.iterdir()] == ["old"]


def test_a_link_stays_and_its_target_is_replaced(
    two: tuple[SequenceState, SequenceState], tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "state", tmp_path / "link"
    link.symlink_to("real/state")
    for state in two:  # it leads nowhere at first
        state.save(link)
        assert link.is_symlink()
        assert target.read_bytes() == state.to_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["state"]


@pytest.mark.parametrize("name", ["x" * 255, "\N{PILE OF POO}" * 60, "\udcff.state"])
def test_every_valid_file_name_works(
    name: str, two: tuple[SequenceState, SequenceState], tmp_path: Path
) -> None:
    for path in (tmp_path / name, os.fspath(tmp_path / name)):
        for state in two:
            assert state.save(path) == os.stat(path).st_size
            assert SequenceState.load(path).to_bytes() == state.to_bytes()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_relative_name(
    two: tuple[SequenceState, SequenceState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    two[0].save("state")
    assert SequenceState.load("state").to_bytes() == two[0].to_bytes()
    # A mapped file may be replaced, and deleted.
    loaded = SequenceState.load("state")
    two[1].save("state")
    Path("state").unlink()
    assert loaded.to_bytes() == two[0].to_bytes()
    assert list(tmp_path.iterdir()) == []


def test_permissions_are_those_of_the_old_file_or_of_any_new_one(
    two: tuple[SequenceState, SequenceState], tmp_path: Path
) -> None:
    two[0].save(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
    # One that exists keeps its own: what only its owner may read stays so.
    for mode in (0o600, 0o640, 0o664):
        (tmp_path / "a").chmod(mode)
        two[1].save(tmp_path / "a")
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


def cut(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(0)


def facts(state: SequenceState | ContextState) -> list[str]:
    """All that is known without keys and values."""
    facts = [repr(state), repr(state.metadata), repr(state.fingerprint), str(state.n_tokens)]
    if isinstance(state, SequenceState):
        facts += [repr(state.tokens), repr(state.positions), str(state.first), str(len(state))]
    else:
        facts += [repr(state.tokens), repr(dict(state.firsts))]
    return facts


def test_facts_survive_truncation_of_the_file(make_context: Make, tmp_path: Path) -> None:
    """Reading what was cut away would end the process."""
    ctx = make_context("llama")
    ctx.decode(WORDS[:50])
    ctx.copy_kv_cache_seq(0, 1)
    ctx.save_sequence(tmp_path / "one", 0, WORDS[:50], {"a": 1})
    ctx.save_context(tmp_path / "all", {0: WORDS[:50]})
    one = ctx.load_sequence(tmp_path / "one", 2)
    everything = ctx.load_context(tmp_path / "all")
    before = facts(one), facts(everything)
    cut(tmp_path / "one")
    cut(tmp_path / "all")
    assert (facts(one), facts(everything)) == before


def test_unmapped_states_do_not_need_their_file(make_context: Make, tmp_path: Path) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:50])
    held = cells_of(ctx, 0)
    ctx.save_sequence(tmp_path / "one", 0, WORDS[:50])
    ctx.save_context(tmp_path / "all")
    want = next_logits(ctx)
    one = ctx.load_sequence(tmp_path / "one", 0, mapped=False)
    everything = ctx.load_context(tmp_path / "all", mapped=False)
    cut(tmp_path / "one")
    cut(tmp_path / "all")
    ctx.clear_kv_cache()
    ctx.restore_sequence(one, 0)
    assert cells_of(ctx, 0) == held
    ctx.restore_context(everything)
    assert cells_of(ctx, 0) == held
    assert np.array_equal(next_logits(ctx), want)
