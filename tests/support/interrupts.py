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
_CALLS = ("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_instructions: dict[CodeType, dict[int, str]] = {}


def _looks(name: str, which: tuple[str, ...]) -> bool:
    """Whether Python looks for signals in this instruction, one of those."""
    return name.startswith(which) and "_INTRINSIC" not in name and "_NO_INTERRUPT" not in name


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
        self._last: dict[FrameType, int] = {}
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
            self._last.clear()
            self._entered.clear()
        return False

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_back is not None:
            self._entered.add(frame.f_back)
        name = frame.f_code.co_filename
        is_ours = "pykvcache" in name and any(folder in name for folder in self._folders)
        if not (is_ours or name.endswith(self._also)):
            return None
        # CPython 3.13 tells of the opcodes of a frame that has a trace function when it asks.
        frame.f_trace = self._step
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
            self._entered.discard(frame)
        elif event == "opcode":
            last = self._last.get(frame)
            self._last[frame] = frame.f_lasti
            called = frame in self._entered
            self._entered.discard(frame)
            # CPython 3.11 tells of no opcode before the first one of the function's own.
            begins = last is None and self._name(frame.f_code, frame.f_lasti) != "RESUME"
            name = self._name(frame.f_code, last) if last is not None else "RESUME" * begins
            # A function in Python looks at its beginning, not at its end.
            if _looks(name, _LOOKS) and not (called and name.startswith("CALL")):
                self.seen += 1
                if self.seen == self.at:
                    raise KeyboardInterrupt
        return self._step

    @staticmethod
    def _name(code: CodeType, at: int) -> str:
        names = _instructions.get(code)
        if names is None:
            names = _instructions[code] = {i.offset: i.opname for i in dis.get_instructions(code)}
        return names.get(at, "")


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
        if step is not None and caller is not None:
            code, at = caller.f_code, caller.f_lasti
            if caller.f_trace is None or not _looks(self._name(code, at), _LOOKS):
                self.seen += 1
                if self.seen == self.at:
                    self._keys[self.at]
        return step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        # CPython 3.10 looks before a generator that goes on is told of it, and so outside of its
        # `try`: only because it is traced.
        if sys.version_info < (3, 11) and frame.f_code.co_filename.endswith(self._also):
            return self._step
        if event == "opcode" and _looks(self._name(frame.f_code, frame.f_lasti), _CALLS):
            self.seen += 1
            if self.seen == self.at:
                self._keys[self.at]
        return self._step
