"""Write C functions for the operators that torch_npu names and the emulator has not.

Usage: missing.py OUTPUT.c ROWS.cpp...

They are in the library, because torch_npu takes another way where a symbol is absent; a call of one
fails with a message that names it. Names in ROUTES are left out for the same reason: torch_npu
then calls an older form, which a row has.
"""

import importlib.util
import re
import sys
from pathlib import Path

# torch_npu looks these up and falls back to the name without the suffix.
ROUTES = {"aclnnTopkV2"}

HEADER = """\
#include <stdio.h>
__attribute__((visibility("default"))) int aclnn_not_implemented(const char* name);
"""


def names_in_wheel() -> set[str]:
    """Operators whose two functions torch_npu's library looks up by name."""
    package = importlib.util.find_spec("torch_npu")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("missing.py: torch_npu is not installed for this Python")
    library = Path(package.submodule_search_locations[0]) / "lib" / "libtorch_npu.so"
    found = re.findall(rb"(aclnn[A-Z]\w*)GetWorkspaceSize\0", library.read_bytes())
    return {name.decode() for name in found}


def main() -> None:
    output, *sources = map(Path, sys.argv[1:])
    rows = set()
    for source in sources:
        rows |= set(re.findall(r"^(?:OPERATOR|[A-Z_]+)\((aclnn\w+)", source.read_text(), re.M))
    missing = sorted(names_in_wheel() - rows - ROUTES)
    lines = [HEADER]
    for name in missing:
        refusal = f'{{ return aclnn_not_implemented("{name}"); }}'
        for function in (f"{name}GetWorkspaceSize", name):
            attribute = '__attribute__((visibility("default")))'
            lines.append(f"{attribute} int {function}(void) {refusal}\n")
    output.write_text("".join(lines))


if __name__ == "__main__":
    main()
