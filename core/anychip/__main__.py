"""``python -m anychip``: the command line."""

from anychip.cli import main

main()
