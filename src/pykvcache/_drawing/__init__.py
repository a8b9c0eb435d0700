"""Pictures of a context's contents, for ``plot`` methods and notebooks.

Uses matplotlib (extra ``plot``) without pyplot, so no global state changes. Notebook views of
sequences and reports are SVG that needs no library.
"""
