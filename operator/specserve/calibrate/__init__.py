"""Measures the break-even curve of a live engine: what a drafting round takes over a plain one.

`sweep` holds batch sizes and step counts in turn and reads the engine's own round times, `fit`
makes a curve and its sentences of them (pure), `command` is the command line.
"""
