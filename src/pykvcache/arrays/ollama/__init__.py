"""Many sequences in shared cells, as in Ollama; public names are in `pykvcache.arrays`.

`cache.Cache` is their interface; `cache.OllamaCache` is the base of those in this package.
"""
