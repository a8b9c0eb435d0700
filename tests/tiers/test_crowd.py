"""Random programs in several processes over the same tiers, while others damage what lies there.

Every process compares its logits with a fresh run after each step; see `crowd.py`. One short
program in the suite; ``make fuzz`` runs longer ones, of more processes and disturbances.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pykvcache.prefix.stores import FolderStore, tools
from stores.servers import Server, freeze, redis_server
from support.models import make_model

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="signals and forks of POSIX")

PROGRAMS = int(os.environ.get("PYKVCACHE_FUZZ_CALLS", "0")) // 3000
SEED = int(os.environ.get("PYKVCACHE_FUZZ_SEED", "1"))
TESTS = Path(__file__).parents[1]
MODELS = ("llama", "gemma3", "mamba", "jamba")
MAX_BYTES = 4 << 20
SECRET = "of sixteen bytes"


class Crowd:
    """Processes over the same tiers, and what happens to these meanwhile."""

    def __init__(self, folder: Path, model: Path, server: Server | None, seed: int) -> None:
        self.dice = random.Random(seed)
        self.folder, self.model, self.server, self.seed = folder / "tier", model, server, seed
        self.where = ",".join([str(self.folder), *([server.url] if server else [])])
        self.secret = SECRET if seed % 2 else None
        self.processes: list[subprocess.Popen[bytes]] = []
        self.n_started = 0
        self.done: list[str] = []

    def start(self, n: int, *, forked: int) -> None:
        self.n_started += 1
        more = {"max_bytes": MAX_BYTES, "secret": self.secret, "forked": forked}
        arguments = [self.where, str(1000 * self.seed + self.n_started), str(n), json.dumps(more)]
        env = os.environ | {"PYTHONPATH": str(TESTS), "GGML_NO_BACKTRACE": "1"}
        command = [sys.executable, "-W", "ignore", "-m", "tiers.crowd", str(self.model), *arguments]
        pipe = subprocess.PIPE
        self.processes.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, env=env))

    def end(self) -> list[dict[str, Any]]:
        """Wait for all; return what they did."""
        said = []
        for process in self.processes:
            out, errors = process.communicate(timeout=300)
            assert process.returncode == 0, (errors.decode()[-3000:], self.done)
            said += [json.loads(line) for line in out.splitlines()]
        return said

    def kill_all(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    @property
    def is_running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    # Disturbances -----------------------------------------------------------------------------

    def disturb(self) -> None:
        """Do one of all things that can happen."""
        steps = [self.damage, self.damage, self.index, self.tree, self.tool, self.stop, self.kill]
        step = self.dice.choice([*steps, *([self.redis] * 3 if self.server else [])])
        self.done.append(step.__name__)
        # What is damaged may be gone meanwhile.
        with contextlib.suppress(OSError):
            step()

    def damage(self) -> None:
        """Cut, change, replace and misdate blocks."""
        dice = self.dice
        for path in dice.sample(found := list(self.folder.rglob("*.block")), min(5, len(found))):
            if not path.is_file() or path.is_symlink():
                continue  # done already
            if not (data := bytearray(path.read_bytes())):
                continue
            what = dice.randrange(7)
            if what == 0:
                os.truncate(path, dice.randrange(path.stat().st_size + 1))
            elif what == 1:
                data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
                with open(path, "r+b") as file:
                    file.write(data)
            elif what == 2:
                path.write_bytes(data[::-1])
            elif what == 3:
                os.utime(path, (dice.choice([0, 4e9]),) * 2)
            else:
                path.unlink()
            if what == 4:
                path.symlink_to("/dev/null")
            elif what == 5:
                os.mkfifo(path)

    def index(self) -> None:
        """Remove, cut or overwrite the index or a part of it."""
        path = self.folder / f"index.sqlite{self.dice.choice(['', '', '', '-wal', '-shm'])}"
        what = self.dice.randrange(3)
        if what == 0 or path.name != "index.sqlite":
            path.unlink()
        elif what == 1:
            os.truncate(path, self.dice.randrange(path.stat().st_size))
        else:
            path.write_bytes(self.dice.randbytes(9000))

    def tree(self) -> None:
        """Remove a folder, or all of it."""

    def tool(self) -> None:
        """Use the command line."""
        commands = [["trim", "1M"], ["verify", "--remove"], ["clear", "--yes"], ["du"], ["ls"]]
        name, *options = self.dice.choice(commands)
        env = os.environ | ({"PYKVCACHE_SECRET": self.secret} if self.secret else {})
        where = self.dice.choice(self.where.split(","))
        command = [sys.executable, "-m", "pykvcache", "cache", name, where, *options]
        done = subprocess.run(command, env=env, capture_output=True, timeout=300)
        assert done.returncode in (0, 1), done.stderr
        assert b"Traceback" not in done.stderr

    def stop(self) -> None:
        """Freeze a process for a while."""
        process = self.dice.choice(self.processes)
        if process.poll() is None:
            with contextlib.suppress(AssertionError):  # it has just ended
                freeze(process)
            time.sleep(2 * self.dice.random())
            process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill a process, and start another one."""
        process = self.dice.choice(self.processes)
        if process.poll() is None and self.n_started < 5:
            process.kill()
            process.communicate()
            self.processes.remove(process)
            self.start(20, forked=0)

    def redis(self) -> None:
        """Do to the server what its operators do."""
        assert self.server is not None
        import redis

        commands = ["FLUSHALL", "CLIENT PAUSE 500", "CLIENT KILL TYPE normal"]
        commands += [f"CONFIG SET maxmemory {n}" for n in ("1mb", "100", "0")]
        with contextlib.suppress(redis.RedisError), redis.Redis(port=self.server.port) as client:
            client.execute_command(*self.dice.choice(commands).split())

    # Afterwards -------------------------------------------------------------------------------

    def check(self) -> None:
        """The folder is whole, within its bound, and nobody has left anything."""
        with FolderStore(self.folder, MAX_BYTES) as store:
            for entry, why in tools.verify(store, self.secret):
                if why is not None:
                    store.discard([entry.key])
            store.trim(MAX_BYTES)
            assert {why for _, why in tools.verify(store, self.secret)} <= {None}
            assert not list((self.folder / "tmp").iterdir()), self.done
            files = [path for path in self.folder.rglob("*") if path.is_file()]
            assert sum(-(-path.lstat().st_size // 4096) * 4096 for path in files) <= MAX_BYTES


def test_two_processes_over_a_folder_that_is_damaged(model_folder: Path, tmp_path: Path) -> None:
    """One is forked from the other."""
    crowd = Crowd(tmp_path, make_model("llama", model_folder), None, SEED)
    crowd.start(8, forked=1)
    try:
        while crowd.is_running:
            with contextlib.suppress(OSError):  # what is damaged may be gone meanwhile
                crowd.damage()
            time.sleep(0.1)
        assert len(crowd.end()) == 2
    finally:
        crowd.kill_all()
    crowd.check()


@pytest.mark.skipif(not PROGRAMS, reason="longer programs: make fuzz")
@pytest.mark.parametrize("has_server", [False, True])
@pytest.mark.parametrize("program", range(PROGRAMS or 1))
def test_a_crowd_that_is_disturbed(
    program: int, has_server: bool, model_folder: Path, tmp_path: Path
) -> None:
    seed = 1000 * SEED + program
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(redis_server(tmp_path)) if has_server else None
        model = make_model(MODELS[program % 4], model_folder)
        crowd = Crowd(tmp_path, model, server, seed)
        stack.callback(crowd.kill_all)
        for _ in range(2 + program % 2):
            crowd.start(20, forked=seed % 3)
        until = time.monotonic() + 300
        while crowd.is_running:
            assert time.monotonic() < until, crowd.done
            time.sleep(crowd.dice.random())
            crowd.disturb()
        crowd.end()
        crowd.check()
        for _ in range(2):
            crowd.processes.clear()
            crowd.start(8, forked=0)
            (said,) = crowd.end()
        assert said["read"], "a fresh process finds nothing"
