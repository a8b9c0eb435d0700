# cython: language_level=3
"""What a call into a compiled class costs at least: methods that only convert nothing."""


cdef class Empty:
    """Methods that do nothing, with the numbers of arguments that the real ones have."""

    def nothing(self):
        """Take no argument."""

    def one(self, a):
        """Take one argument."""

    def two(self, a, b):
        """Take two arguments."""

    def four(self, a, b, c, d):
        """Take four arguments."""
