# cython: language_level=3, embedsignature=False, auto_pickle=False, autotestdict=False
# cython: subinterpreters_compatible=no, freethreading_compatible=False
"""JSON schemas and chat formats by llama.cpp's common/ library: a separate module that needs no model."""

from libcpp cimport bool
from libcpp.memory cimport unique_ptr
from libcpp.string cimport string


cdef extern from "chat_format.h" namespace "pykv" nogil:
    string schema_grammar_of "pykv::schema_grammar"(const string& schema) except +
    cdef cppclass chat_format:
        chat_format(
            const string& source, const string& bos, const string& eos, const string& request) except +
        const string& facts()
        string parse(const string& text, bool is_partial) except +


def schema_grammar(bytes schema not None):
    """Return the GBNF grammar of a JSON schema; RuntimeError names an unsupported keyword."""
    cdef string text = schema, grammar
    with nogil:
        grammar = schema_grammar_of(text)
    return grammar.decode("utf-8")


cdef class ChatFormat:
    """Format of a template's assistant messages; immutable, usable by any number of threads."""

    cdef unique_ptr[chat_format] it

    def __cinit__(
        self, bytes source not None, bytes bos not None, bytes eos not None, bytes request not None,
    ):
        cdef string a = source, b = bos, c = eos, d = request
        with nogil:
            self.it.reset(new chat_format(a, b, c, d))

    def facts(self):
        """Return the format's facts as JSON."""
        cdef string facts = self.it.get().facts()
        return facts.decode("utf-8")

    def parse(self, bytes text not None, bint is_partial):
        """Parse a text into a message, as JSON; RuntimeError if it is not one."""
        cdef string a = text, found
        with nogil:
            found = self.it.get().parse(a, is_partial)
        return found.decode("utf-8")
