"""What pages for people have in common: nothing to load, no script, wide and narrow, two schemes.

``page.html.jinja`` is the frame of each, ``page.css`` its style, ``svg`` draws.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

_HERE = Path(__file__).parent
# XML 1.0, section 2.2: what a document may hold. A vendor's error message may hold anything.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """The text without what neither XML nor HTML can hold."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def count_text(value: int) -> str:
    """A count with its thousands apart."""
    return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def render(template: Path, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """A page from a template that extends ``page.html.jinja``."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, _HERE]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(count=count_text, **filters)
    style = Markup((_HERE / "page.css").read_text(encoding="utf-8"))
    return environment.get_template(template.name).render(style=style, **values)
