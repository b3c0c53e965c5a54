"""Where is a report kept? In two files: what decides, as JSON, and the measurements, compressed.

``report.json`` has all that :func:`.statement.verify` needs. ``report.json.details.gz`` has every
result in full, a line of JSON each, for whoever draws or compares distributions; the report names
it with its SHA-256. They lie in one folder, and the first is of use without the second.
"""

import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from anychip.conformance.report import Details, Report, Result, to_text

SUFFIX = ".details.gz"
"""Of the second file, behind the name of the first."""


def write_report(report: Report, file: Path) -> None:
    """Writes a report, and beside it its details."""
    lines = (json.dumps(result.to_json()) + "\n" for result in report.results)
    # Without the time of day: the same results have the same bytes.
    packed = gzip.compress("".join(lines).encode(), mtime=0)
    beside = file.with_name(file.name + SUFFIX)
    beside.write_bytes(packed)
    details = Details(beside.name, hashlib.sha256(packed).hexdigest())
    written = replace(report, details=details).to_json()
    file.write_text(to_text(written), encoding="utf-8")


def read_document(file: Path) -> dict[str, Any]:
    """The JSON of a report.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not JSON.
    """
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not a report: it is not JSON ({error})") from None
    return found


def read_report(file: Path) -> Report:
    """A report with all its measurements.

    Raises:
        FileNotFoundError: there is no such file, or no details beside it.
        ValueError: it is no report, or the details are not those that it was written with.
    """
    document = read_document(file)
    report = Report.from_json(document)
    if report.details is None:
        raise FileNotFoundError(f"{file} was written without details")
    if why := unlike_details(document, file.parent):
        raise ValueError(why)
    packed = (file.parent / report.details.file).read_bytes()
    rows = map(json.loads, gzip.decompress(packed).decode().splitlines())
    return replace(report, results=tuple(map(Result.from_json, rows)))


def unlike_details(document: Mapping[str, Any], folder: Path) -> str | None:
    """What is wrong with a report's details, if they are there."""
    details = Report.from_json(document).details
    if details is None or not (folder / details.file).is_file():
        return None
    found = hashlib.sha256((folder / details.file).read_bytes()).hexdigest()
    if found == details.sha256:
        return None
    return f"{details.file} is not the file that was written with it: its SHA-256 is {found}"
