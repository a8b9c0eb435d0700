# cython: language_level=3, embedsignature=False, auto_pickle=False, autotestdict=False
# cython: subinterpreters_compatible=no, freethreading_compatible=False
"""JSON schemas and chat formats by llama.cpp's common/ library: a module of its own, without a model."""

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
    """Return the GBNF grammar of a JSON schema; RuntimeError says what it does not know."""
    cdef string text = schema, grammar
    with nogil:
        grammar = schema_grammar_of(text)
    return grammar.decode("utf-8")


cdef class ChatFormat:
    """How a template's assistant messages are written; constant, for any number of threads."""

    cdef unique_ptr[chat_format] it

    def __cinit__(
        self, bytes source not None, bytes bos not None, bytes eos not None, bytes request not None,
    ):
        cdef string a = source, b = bos, c = eos, d = request
        with nogil:
            self.it.reset(new chat_format(a, b, c, d))

    def facts(self):
        """Return what is known of the format, as JSON."""
        cdef string facts = self.it.get().facts()
        return facts.decode("utf-8")

    def parse(self, bytes text not None, bint is_partial):
        """Return the message that a text is, as JSON; RuntimeError if it is none."""
        cdef string a = text, found
        with nogil:
            found = self.it.get().parse(a, is_partial)
        return found.decode("utf-8")
