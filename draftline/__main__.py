"""`python -m draftline` is the command `draftline`."""

from draftline.cli import main

main()
