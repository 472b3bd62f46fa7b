"""`python -m trigrid`."""

from trigrid.cli import main

main()
