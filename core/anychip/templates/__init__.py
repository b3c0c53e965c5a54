"""What ``anychip new-backend`` writes: files with ``$name`` and the like to be filled in.

One folder per kind of project, and one of what every kind has. A file is named as it will be, plus
``.tmpl``, so that no tool takes it for what it is not; the folder ``package`` becomes the plugin's
package.
"""

from collections.abc import Mapping
from pathlib import Path
from string import Template

SUFFIX = ".tmpl"
PACKAGE = "package"
EVERY_KIND = "every_kind"


def render(kind: str, values: Mapping[str, str]) -> dict[Path, str]:
    """The text of every file of a project, by its path in it.

    Args:
        kind: of project; its folder has the name with ``_`` for ``-``.
        values: what stands for each ``$name``; ``package`` is also the name of the package.

    Raises:
        KeyError: a template names a value that is not there.
    """
    rendered = {}
    for folder in (Path(__file__).parent / name for name in (EVERY_KIND, kind.replace("-", "_"))):
        for file in sorted(folder.rglob(f"*{SUFFIX}")):
            path = file.relative_to(folder)
            parts = [values["package"] if part == PACKAGE else part for part in path.parent.parts]
            text = Template(file.read_text(encoding="utf-8")).substitute(values)
            rendered[Path(*parts, file.name.removesuffix(SUFFIX))] = text
    return rendered
