"""Chat templates as transformers renders them, within bounds; imported by `_chat` only.

A template comes with a downloaded file: it is a program that nobody has read. `compiler` puts a
count of steps into everything that repeats, `environment` sees each operation, call and filter
before it is done, `methods` and `filters` say what one costs, and `budget` ends the program.
"""
