"""What is released: the wheel holds the package and nothing else, the source archive what its tests need."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import yaml

from noisewise import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the source archive; without a network, as the backend is installed."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    code = f"from hatchling import build; build.build_wheel({str(folder)!r}); build.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    return folder


def tracked(*rooms):
    """Files of the repository, or of an archive of it, that could be released."""
    found = (path for room in rooms for path in (ROOT / room).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(ROOT)) for path in found}


def test_the_wheel_holds_the_package_and_its_data_alone(built):
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"noisewise-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {name for name in names if not name.startswith(f"noisewise-{__version__}.dist-info/")}
    assert code == tracked("noisewise")
    assert {"noisewise/py.typed", "noisewise/report/style.css", "noisewise/training/presets/digits.yaml"} < code
    assert f"noisewise-{__version__}.dist-info/licenses/LICENSE" in names


def test_the_wheel_says_what_it_is_and_needs(built):
    (wheel,) = built.glob("*.whl")
    archive, info = zipfile.ZipFile(wheel), f"noisewise-{__version__}.dist-info"
    metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    needed = metadata.get_all("Requires-Dist")
    assert sorted(one for one in needed if "extra ==" not in one) == ["numpy>=1.26", "torch>=2.6"]
    assert "noisewise = noisewise.commands.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    for extra in ("accelerate", "diffusers"):
        assert len([one for one in needed if f"extra == '{extra}'" in one]) <= 2
    classifiers = pytest.importorskip("trove_classifiers").classifiers
    assert set(metadata.get_all("Classifier")) <= classifiers


def test_the_source_archive_can_test_itself(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert tracked("noisewise", "tests", "docs", "examples", "benchmarks") <= names
    assert {"pyproject.toml", "LICENSE", "README.md", "CITATION.cff", "constraints.txt", "Makefile", "mkdocs.yml"} <= names
    assert {name.split("/")[0] for name in names} <= {*os.listdir(ROOT), "PKG-INFO"}
    assert not [name for name in names if name.startswith((".venv", "out/", "runs/", "data/", "site/"))]


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    assert set(citation) >= {"cff-version", "message", "title", "authors"}
