"""Is everything pinned, is there one version number, and is ``import anychip`` light?"""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import tomlkit
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import anychip

ROOT = Path(__file__).parents[3]
PROJECT = tomlkit.parse((ROOT / "pyproject.toml").read_text(encoding="utf-8")).unwrap()


def pins() -> dict[str, Requirement]:
    """The lines of constraints.txt that apply to this Python, by canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    here = [pin for pin in wanted if pin.marker is None or pin.marker.evaluate()]
    return {canonicalize_name(pin.name): pin for pin in here}


def own_requirements() -> list[Requirement]:
    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    texts = [text for group in groups for text in group] + PROJECT["build-system"]["requires"]
    return [req for req in map(Requirement, texts) if req.name != "anychip"]


def version_in(path: str, pattern: str) -> str:
    found = re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{path} has nothing like {pattern}"
    return found[1]


def is_made_by_make() -> bool:
    return any(Path(sys.prefix).glob("installed-*"))


def test_constraints_pin_each_name_once_and_exactly() -> None:
    for pin in pins().values():
        (specifier,) = pin.specifier
        assert specifier.operator == "==", f"{pin} is not exact"
        assert "*" not in specifier.version, f"{pin} is not exact"


@pytest.mark.parametrize("requirement", own_requirements(), ids=str)
def test_requirement_of_the_project_is_met_by_its_pin(requirement: Requirement) -> None:
    (pin,) = pins()[canonicalize_name(requirement.name)].specifier
    assert requirement.specifier.contains(pin.version)


@pytest.mark.skipif(not is_made_by_make(), reason="this environment was not made by `make`")
def test_installed_distributions_are_those_of_the_constraints() -> None:
    installed = {
        canonicalize_name(dist.name): Version(dist.version)
        for dist in metadata.distributions()
        if not dist.read_text("direct_url.json")  # a folder of this machine, like anychip itself
    }
    pinned = pins()
    wrong = {
        name: str(version) for name, version in installed.items()
        if name not in pinned or not pinned[name].specifier.contains(version)
    }  # fmt: skip
    assert wrong == {}, "add what was installed to constraints.txt, at the version to be kept"


@pytest.mark.skipif(not is_made_by_make(), reason="this environment was not made by `make`")
def test_installed_version_is_that_of_the_source() -> None:
    assert metadata.version("anychip") == anychip.__version__


@pytest.mark.parametrize(("path", "pattern"), [
    ("core/anychip/__init__.py", r'^__version__ = "(.*)"$'),
    ("CHANGELOG.md", r"^## \[?(\d[^\]\s]*)"),
])  # fmt: skip
def test_version_in_file_is_that_of_the_package(path: str, pattern: str) -> None:
    assert version_in(path, pattern) == anychip.__version__


@pytest.mark.parametrize("statement", ["import anychip", "from anychip import Backend, Probe"])
def test_import_of_a_plugin_author_loads_no_torch(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_torch_compiler_is_not_loaded_where_nothing_is_compiled() -> None:
    code = """
import sys, torch
import anychip
from anychip import conformance, ops
from anychip.comm.threads import run_ranks

anychip.use("cpu")
x = torch.ones(2, 3, requires_grad=True)
ops.permute(x, torch.tensor([[1], [0]]), num_experts=2)[0].sum().backward()
run_ranks(2, lambda group: None)
assert conformance.run("cpu", chapters=["operators"], select="relu/fp32").passed
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("False", "")
