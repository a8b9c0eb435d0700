"""Pictures of what a context holds; methods named ``plot`` and notebooks call it.

Axes are matplotlib's (extra ``plot``), made without pyplot: nothing global is touched. What
notebooks show of sequences and reports is SVG that needs no library.
"""
