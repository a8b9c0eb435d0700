"""Many sequences in shared cells, as in Ollama; public names are in `pykvcache.arrays`.

`protocol.Cache` is what all have in common.
"""
