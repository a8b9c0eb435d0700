# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: embedsignature=False, initializedcheck=False, auto_pickle=False, autotestdict=False
# cython: subinterpreters_compatible=no, freethreading_compatible=False
"""llama.cpp, 1:1, behind checks: pointers, locks, error codes as exceptions.

No defaults, no guesses. A line with ``lib.`` calls C.
"""
cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.exc cimport PyErr_CheckSignals
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.sequence cimport PySequence_Fast_ITEMS
from libc.math cimport INFINITY, NAN, exp, log
from libc.stdint cimport INT32_MAX, INT32_MIN, int8_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset, strlen
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr, unique_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

from pykvcache._native cimport libpykv as lib

import _signal
import atexit
import collections
import contextlib
import logging
import os
import sys
import threading
import time
import weakref

import numpy as np

from pykvcache._arguments import as_index
from pykvcache.errors import (
    ArgumentError,
    ClosedError,
    ContextCreateError,
    DecodeAborted,
    DecodeError,
    DeviceLost,
    GrammarError,
    InternalError,
    InvalidBatch,
    ModelLoadError,
    NoKvCacheSlot,
    OutOfRangeError,
    OutputNotFinite,
    P0TooLarge,
    P1TooLarge,
    PartialStateError,
    PositionError,
    ReentryError,
    SeqIdTooLarge,
    SequenceIdError,
    StaleViewError,
    StateDamaged,
    StateLayoutMismatch,
    StateTrailingBytes,
    StateTruncated,
    UnsupportedOperation,
)
from pykvcache.errors import shown

# llama.cpp's limit of sequences per context (LLAMA_MAX_SEQ).
cdef enum:
    MAX_SEQ = 256

include "guard/hooks.pxi"
include "context/devices.pxi"
include "context/convert.pxi"
include "context/model.pxi"
include "context/handle.pxi"
include "context/memory.pxi"
include "context/cells.pxi"
include "context/kv.pxi"
include "state/state.pxi"
include "state/blocks.pxi"
include "state/partial.pxi"
include "context/rows.pxi"
include "context/outputs.pxi"
include "context/batch.pxi"
include "context/decode.pxi"
include "context/adapters.pxi"
include "context/sampler.pxi"
include "context/lanes.pxi"
include "context/steps.pxi"
include "context/turns.pxi"
