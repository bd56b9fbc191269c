"""One file per command, or for two that belong together: its options, the call, what is printed.

The modules are imported before it is known what is wanted, so that what takes time is imported inside their functions.
"""
