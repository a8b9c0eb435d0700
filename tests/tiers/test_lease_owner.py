"""The leases of one cache by themselves: taken, given back, and none once it was closed."""

from __future__ import annotations

import threading
import time

import pytest

from pykvcache.prefix.tiers import leases


class Given:
    """A tier that gives every lease, after a while if it is told to."""

    def __init__(self, wait: threading.Event | None = None) -> None:
        self.held: list[bytes] = []
        self.released: list[bytes] = []
        self.wait, self.asked = wait, threading.Event()

    def lease(self, key: bytes, seconds: float, thread: int) -> bool:
        self.asked.set()
        if self.wait is not None:
            assert self.wait.wait(20)
        self.held.append(key)
        return True

    def release(self, key: bytes) -> None:
        self.released.append(key)


def test_a_closed_cache_takes_no_lease() -> None:
    owner, tier = leases.Leases(), Given()
    owner.close(0)
    lease = leases.Lease(owner, [tier], b"k", 60, 0)  # type: ignore[list-item]
    assert not lease.held
    assert lease.follows is None
    assert not tier.held


@pytest.mark.parametrize("how", ["close", "retire"])
def test_a_lease_that_comes_as_the_cache_is_closed_goes_back(how: str) -> None:
    go = threading.Event()
    owner, tier = leases.Leases(), Given(go)
    made: list[leases.Lease] = []
    thread = threading.Thread(
        target=lambda: made.append(leases.Lease(owner, [tier], b"k", 60, 0))  # type: ignore[list-item]
    )
    thread.start()
    assert tier.asked.wait(20)
    if how == "retire":
        owner.retire(lambda held: None)
        go.set()
    else:
        closing = threading.Thread(target=owner.close, args=(20,))
        closing.start()
        time.sleep(0.05)
        assert closing.is_alive(), "it does not wait for who is asking"
        go.set()
        closing.join(20)
    thread.join(20)
    assert tier.held == tier.released == [b"k"]
    assert not made[0].held


def test_retiring_gives_back_what_is_held() -> None:
    owner, tier = leases.Leases(), Given()
    lease = leases.Lease(owner, [tier], b"k", 60, 0)  # type: ignore[list-item]
    owner.retire(owner.release)
    assert tier.released == [b"k"]
    assert not lease.held


def test_a_lease_that_ran_out_is_left_to_its_next_holder() -> None:
    owner, tier = leases.Leases(), Given()
    lease = leases.Lease(owner, [tier], b"k", 0.01, 0)  # type: ignore[list-item]
    time.sleep(0.02)
    lease.release()
    assert not tier.released
    assert not lease.held
