"""The release check compares versions, wheels and licences."""

import zipfile

import pytest
import tools.release_check as check

PURE, COMPILED = "twofold-1.0-py3-none-any.whl", "twofold-1.0-cp311-cp311-linux_x86_64.whl"


@pytest.fixture
def release(tmp_path):
    """Return the root of a source tree of version 1.0 with a pure and a compiled wheel."""
    for name, text in {
        "pyproject.toml": '[project]\nversion = "1.0"\n',
        "CHANGELOG.md": "# Changelog\n\n## [1.0]\n\n## [0.9]\n",
        "src/twofold/__init__.py": '__version__ = "1.0"\n',
        "src/twofold/data/one.toml": "a = 1\n",
        "deploy/helm/twofold/Chart.yaml": "version: 3.0\nappVersion: 1.0\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    files = ["twofold/__init__.py", "twofold/data/one.toml", "twofold-1.0.dist-info/METADATA"]
    wheel(tmp_path, PURE, files)
    wheel(tmp_path, COMPILED, [*files, "twofold/one.cpython-311-x86_64-linux-gnu.so"])
    return tmp_path


def wheel(root, name, files):
    (root / "dist").mkdir(exist_ok=True)
    with zipfile.ZipFile(root / "dist" / name, "w") as archive:
        for file in files:
            archive.writestr(file, "")


def problems(root):
    return [*check.version_problems(root), *check.wheel_problems(root / "dist", root / "src" / "twofold")]


def test_accepts_a_complete_release(release):
    assert problems(release) == []


def test_reports_an_unreleased_changelog(release):
    (release / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [1.0]\n")
    assert problems(release) == ["CHANGELOG.md names Unreleased, pyproject.toml 1.0"]


def test_reports_a_file_that_a_wheel_lacks_or_should_not_have(release):
    wheel(release, PURE, ["twofold/__init__.py", "tests/test_one.py"])
    assert problems(release) == [f"{PURE} lacks twofold/data/one.toml", f"{PURE} has tests/test_one.py"]


def test_reports_a_compiled_wheel_without_machine_code(release):
    wheel(release, COMPILED, ["twofold/__init__.py", "twofold/data/one.toml"])
    assert problems(release) == [f"{COMPILED} has 0 compiled modules"]


def test_reports_a_missing_wheel(release):
    (release / "dist" / COMPILED).unlink()
    assert problems(release) == [f"{release / 'dist'} has 1 pure and 0 compiled wheels, not one of each"]


@pytest.mark.parametrize(
    ("licence", "compatible"),
    [
        ("MIT", True),
        ("Apache-2.0 AND (BSD-3-Clause OR GPL-2.0-only)", True),
        ("Apache Software License; MIT License", True),
        ("MIT License\n\nCopyright (c) the authors", True),
        ("MIT AND GPL-3.0-only", False),
        ("UNKNOWN", False),
    ],
)
def test_accepts_compatible_licences_only(licence, compatible):
    assert check.compatible(licence) is compatible


def test_finds_indirect_dependencies_of_the_chosen_extras():
    light, serving = check.dependencies("twofold"), check.dependencies("twofold", ["serve"])
    assert "multidict" in light  # of aiohttp
    assert "starlette" not in light
    assert "starlette" in serving  # of fastapi


def test_reports_vulnerabilities_and_packages_without_an_answer(capsys):
    audit = {
        "dependencies": [
            {"name": "one", "version": "1", "vulns": [{"id": "CVE-1"}]},
            {"name": "two", "version": "2", "vulns": []},
            {"name": "three", "skip_reason": "not found"},
        ]
    }
    assert list(check.vulnerability_problems(audit)) == ["one 1 has CVE-1"]
    assert capsys.readouterr().out == "The vulnerability database gave no answer for 1 of 3 packages.\n"
