"""The command line: one module per subcommand, each loaded when it is called.

``group`` finds the subcommand, ``exit_codes`` says what an error prints and how the process ends.
A module ``<name>_command`` has a ``click.Command`` named ``command``; what that returns, if it is
an int, is the exit code.
"""

import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """The console script ``anychip``."""
    from anychip.cli.group import run

    sys.exit(run(sys.argv[1:]))
