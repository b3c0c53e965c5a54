"""A report as JUnit XML, which continuous integration systems show: one testcase per case.

The dialect is the one that pytest writes (xunit2, github.com/jenkinsci/xunit-plugin): unsupported
cases and expected failures are skipped, with their reasons.
"""

from xml.etree import ElementTree

from anychip.conformance.report import Report, Result
from anychip.pages import printable


def to_junit(report: Report) -> str:
    """The XML document."""
    known, counts = report.identity, report.counts()
    skipped = counts["unsupported"] + counts["expected failure"]
    totals = {
        "tests": str(len(report.results)),
        "failures": str(len(report.failures)),
        "errors": "0",
        "skipped": str(skipped),
        "time": f"{report.seconds:.3f}",
    }
    root = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": "anychip.conformance", "timestamp": report.started, **totals}
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (
        ("backend", known.backend),
        ("version", f"{known.distribution} {known.version}"),
        ("plugin", known.plugin_hash or "not installed"),
        ("device", known.device),
        ("suite", f"{known.suite} {known.suite_hash}"),
        ("level", report.level),
        ("must-pass list", report.must_pass[1]),
    ):
        ElementTree.SubElement(properties, "property", {"name": name, "value": printable(value)})
    for result in report.results:
        _add(suite, report, result)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add(suite: ElementTree.Element, report: Report, result: Result) -> None:
    path, _, name = result.case.rpartition("/")
    found = ElementTree.SubElement(
        suite,
        "testcase",
        {
            "classname": printable("anychip." + path.replace("/", ".")),
            "name": printable(name),
            "time": f"{result.seconds:.4f}",
        },
    )
    if result.outcome == "passed":
        return
    if result.ok:
        words = {"message": printable(f"{result.outcome}: {result.reason}")}
        ElementTree.SubElement(found, "skipped", words)
        return
    first = (result.reason.splitlines() or [result.outcome])[0]
    failure = ElementTree.SubElement(
        found, "failure", {"type": result.outcome, "message": printable(first)}
    )
    failure.text = printable(report.explain(result))
