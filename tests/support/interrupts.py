"""KeyboardInterrupt wherever CPython looks for signals in some of our code."""

from __future__ import annotations

import _thread
import dis
import gc
import signal
import sys
from collections import defaultdict
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

_LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")


class _Code:
    """Where a function's instructions are, those in which Python looks for signals."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        names = {i.offset: i.opname for i in dis.get_instructions(code)}
        self.looks = {
            at: name
            for at, name in names.items()
            if name.startswith(_LOOKS) and "_INTRINSIC" not in name and "_NO_INTERRUPT" not in name
        }
        self.calls = {at for at, name in self.looks.items() if name.startswith("CALL")}
        self.resumes = {at for at, name in names.items() if name == "RESUME"}
        # Where it looks when it has done them, and not before.
        self.ends = {at for at, name in self.looks.items() if not name.startswith("RESUME")}


# By id: to hash a code is to hash all that it consists of, and this is asked at each instruction.
_codes: dict[int, _Code] = {}


def _known(code: CodeType) -> _Code:
    known = _codes.get(id(code))
    if known is None:
        known = _codes[id(code)] = _Code(code)
    return known


class InterruptAnywhere:
    """Raise KeyboardInterrupt at the n-th place; with n below 1 only count the places.

    A place is the instruction that follows a call of compiled code, the beginning of a function, or
    the end of a round of a loop, in a file of one of `folders`. (`sys.setprofile` would not tell of
    calls of Cython's functions.)
    """

    def __init__(
        self,
        at: int,
        folders: tuple[str, ...] = ("/generate/", "/sequence/"),
        also: tuple[str, ...] = (),
    ) -> None:
        self.at = at
        self.seen = 0
        self._folders = folders
        self._also = also  # ends of names of Python's own files
        self._is_ours: dict[str, bool] = {}
        self._entered: set[FrameType] = set()

    def run(self, call: Callable[[], object]) -> bool:
        """Call; return whether it was interrupted."""
        before = sys.gettrace()
        # What the collector finds belongs to something else, and `__del__` hides an interrupt.
        collects = gc.isenabled()
        gc.disable()
        # CPython 3.12 tells of no opcode unless a frame has asked for that before (gh-103615).
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._enter)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()
            self._entered.clear()
        return False

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        caller = frame.f_back
        if caller is not None:
            self._entered.add(caller)
        name = frame.f_code.co_filename
        is_ours = self._is_ours.get(name)
        if is_ours is None:
            is_ours = "pykvcache" in name and any(folder in name for folder in self._folders)
            is_ours = self._is_ours[name] = is_ours or name.endswith(self._also)
        if not is_ours:
            return None
        # CPython 3.13 tells of the opcodes of a frame that has a trace function when it asks.
        frame.f_trace = step = self._step_of(_known(frame.f_code))
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return step

    def _step_of(self, code: _Code) -> Callable[[FrameType, str, Any], Any]:
        """Return what is called at each instruction of one frame."""
        entered, looks, calls, resumes = self._entered, code.looks, code.calls, code.resumes
        last: int | None = None

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event == "opcode":
                before, last = last, frame.f_lasti
                called = frame in entered
                if called:
                    entered.discard(frame)
                if before is None:
                    # CPython 3.11 tells of no opcode before the first one of the function's own.
                    is_place = last not in resumes
                else:
                    # A function in Python looks at its beginning, not at its end.
                    is_place = before in looks and not (called and before in calls)
                if is_place:
                    self.seen += 1
                    if self.seen == self.at:
                        raise KeyboardInterrupt
            elif event == "return":
                last = None
                entered.discard(frame)
            return frame.f_trace  # and not itself: only a collection would free it

        return step


class CtrlCAnywhere(InterruptAnywhere):
    """As `InterruptAnywhere`, by the signal itself, and so within the `try` or `with` of the call.

    A place is a call, the end of a round of a loop, or the beginning of a function that is called
    by something else than a call: Python looks for the signal when it has done that.
    """

    def __init__(self, at: int, folders: tuple[str, ...], also: tuple[str, ...] = ()) -> None:
        super().__init__(at, folders, also)
        # Asking it for something presses the keys. After a call Python would look at once.
        self._keys = defaultdict[int, None](_thread.interrupt_main)

    def run(self, call: Callable[[], object]) -> bool:
        """Call; return whether it was interrupted."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return super().run(call)
        finally:
            signal.signal(signal.SIGINT, before)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        step = super()._enter(frame, event, arg)
        caller = frame.f_back
        if (
            step is not None
            and caller is not None
            and (caller.f_trace is None or caller.f_lasti not in _known(caller.f_code).looks)
        ):
            self.seen += 1
            if self.seen == self.at:
                self._keys[self.at]
        return step

    def _step_of(self, code: _Code) -> Callable[[FrameType, str, Any], Any]:
        # CPython 3.10 looks before a generator that goes on is told of it, and so outside of its
        # `try`: only because it is traced.
        if sys.version_info < (3, 11) and code.code.co_filename.endswith(self._also):
            return self._pass
        ends = code.ends

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "opcode" and frame.f_lasti in ends:
                self.seen += 1
                if self.seen == self.at:
                    self._keys[self.at]
            return frame.f_trace

        return step

    def _pass(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._pass
