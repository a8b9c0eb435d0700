"""llama.cpp's memory (KV cache) as a Python object that can be trusted."""
