"""Which pages does the site have? Those of the repository, under their own paths.

A page keeps the path that it has in the repository, so that a link that works on GitHub works on
the site. What pages link to and is no page becomes one: a file of source code is shown, a folder
without a README is listed. Nothing is copied, and what no page links to is not there.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>[~.]?")
IN_CHINESE = re.compile(r"(?<=[\u3001-\u9fff\uff01-\uff5e])\n(?=[\u3001-\u9fff\uff01-\uff5e])")
PICTURES = (".png", ".svg")
SHOWN = {".c": "c", ".cpp": "cpp", ".h": "cpp", ".cuh": "cuda", ".cu": "cuda", ".json": "json",
         ".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml"}  # fmt: skip


def on_config(config: Any) -> Any:
    """Several versions are there only where mike publishes them."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike", "default": "latest"}
    return config


def on_files(files: Files, config: Any) -> Files:
    """The pages of docs/ at their paths in the repository, and all that they link to."""
    found = {}
    for file in files:
        is_ours = file.src_dir == config.docs_dir and not file.inclusion.is_excluded()
        if is_ours or file.generated_by:
            name = f"docs/{file.src_uri}"
            found[name] = _file(name, config)
    for name in ("README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        found[name] = _file(name, config)
    waiting = [name for name in found if name.endswith(".md")]
    while waiting:
        name = waiting.pop()
        for linked in _linked(found[name].content_string, PurePosixPath(name).parent):
            if linked not in found:
                found[linked] = _file(linked, config)
                if linked.endswith(".md"):
                    waiting.append(linked)
    theme = [file for file in files if file.src_dir not in (config.docs_dir, None)]
    return Files([*theme, *found.values()])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links lead to the page of what they name; lines of Chinese are joined without a space."""
    folder = PurePosixPath(page.file.src_uri).parent

    def changed(link: re.Match[str]) -> str:
        target = _page_of(link[2], folder)
        if target is None or _target(link[2], folder) == target:
            return link[0]
        return f"{link[1]}{_relative(target, folder)}{link[3] or ''}{link[4]}"

    return LINK.sub(changed, IN_CHINESE.sub("", markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name things as ``:class:`Name```, of which Markdown knows nothing."""
    return ROLE.sub("<code>", html)


def _linked(text: str, folder: PurePosixPath) -> Iterator[str]:
    for link in LINK.finditer(text):
        target = _page_of(link[2], folder)
        if target is not None:
            yield target


def _target(link: str, folder: PurePosixPath) -> str:
    return normpath(str(folder / link))


def _page_of(link: str, folder: PurePosixPath) -> str | None:
    """The page of a link, by its path in the repository; None: it leads elsewhere, or nowhere."""
    name = _target(link, folder)
    path = ROOT / name
    if ":" in link or name.startswith("..") or not path.exists():
        return None
    if path.is_dir():
        return f"{name}/README.md"
    return name if path.suffix in (".md", *PICTURES) else f"{name}.md"


def _relative(name: str, folder: PurePosixPath) -> str:
    return "../" * len(folder.parts) + name


def _file(name: str, config: Any) -> File:
    if (ROOT / name).exists():
        return File(name, str(ROOT), config.site_dir, config.use_directory_urls)
    source = ROOT / name.removesuffix("/README.md").removesuffix(".md")
    text = _listing(source) if source.is_dir() else _code(source)
    return File.generated(config, name, content=f"---\nsearch:\n  exclude: true\n---\n{text}")


def _code(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    language = SHOWN.get(path.suffix, "text")
    return f"# {path.name}\n\n`{path.relative_to(ROOT)}`\n\n~~~~~~~~ {language}\n{text}\n~~~~~~~~\n"


def _listing(folder: Path) -> str:
    rows = [f"# {folder.relative_to(ROOT)}", "", "| file | what it is |", "|---|---|"]
    for path in sorted(folder.iterdir()):
        if path.suffix in SHOWN or path.name == "Dockerfile":
            rows.append(f"| [`{path.name}`]({path.name}) | {_first_line(path)} |")
    return "\n".join(rows)


def _first_line(path: Path) -> str:
    """What a file says of itself in its first line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    elif not text.startswith(("//", "/*", "#")):
        return ""
    line = text.partition("\n")[0] if not text.startswith("#!") else text.split("\n")[1]
    return line.strip("/*# ").replace("|", "\\|")
