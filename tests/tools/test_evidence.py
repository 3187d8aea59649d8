"""Figures of the README and of the Evidence page come from recorded benchmark runs."""

import json
import subprocess
import sys

import pytest

from support.traces import ROOT

ENTRIES = """
from evidence_entry import Entry, Figure, file, times

def read(report):
    return {"ratio": times(report["ratio"]), "requests": Figure(report["requests"])}

def entry(name, command, **kwargs):
    summary = "{requests} requests take {ratio} the time"
    return Entry(name=name, claim=f"Claim of {name}", command=command, summary=summary, page="index.md", read=read,
        packages=(), **kwargs)

ENTRIES = (
    entry("fast", "python fast.py"),
    entry("skipped", "python absent.py", needs=(file("$ABSENT_PEER", "set ABSENT_PEER to its folder"),)),
    entry("long", "python fast.py --long"),
)
ALLOWED = {"Python 3.11": "a version"}
"""
BENCHMARK = """
import json, sys
from pathlib import Path
Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({"ratio": 1.2345678, "requests": 25506}))
"""
README = """# Title

Needs Python 3.11. The fast one takes <!-- evidence fast.ratio -->?<!-- / --> the time
for <!-- evidence fast.requests -->?<!-- / --> requests on <!-- evidence fast.machine -->?<!-- / -->, see `--limit 5ms`.

```
printed: 7.5 ms
```
"""


@pytest.fixture
def project(tmp_path):
    """A project whose skipped and long entries were recorded earlier, and whose fast entry runs."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "entries.py").write_text(ENTRIES)
    (tmp_path / "fast.py").write_text(BENCHMARK)
    figures = {"ratio": {"value": 2.5, "unit": "×"}, "requests": {"value": 10}}
    earlier = {"date": "2026-01-01", "machine": {"cpu": "Old", "cores": 1}, "versions": {}, "figures": figures}
    commands = {"skipped": "python absent.py", "long": "python fast.py --long"}
    records = {name: {"command": command, **earlier} for name, command in commands.items()}
    (tmp_path / "docs" / "evidence.json").write_text(json.dumps(records))
    assert evidence(tmp_path, "run").returncode == 0
    return tmp_path


def evidence(root, *arguments):
    command = [sys.executable, str(ROOT / "tools" / "evidence.py"), *arguments]
    command += ["--root", str(root), "--entries", str(root / "entries.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def replace(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_figures_of_a_run_are_recorded_unrounded_and_shown_in_the_pages(project):
    record = json.loads((project / "docs" / "evidence.json").read_text())["fast"]
    assert record["figures"]["ratio"] == {"value": 1.2345678, "unit": "×"}
    assert record["command"] == "python fast.py"
    assert record["machine"]["cores"] > 0
    assert record["versions"].keys() >= {"twofold", "python"}
    assert (
        "-->1.23×<!-- / --> the time\nfor <!-- evidence fast.requests -->25,506<!"
        in (project / "README.md").read_text()
    )
    assert "25,506 requests take 1.23× the time" in (project / "docs" / "evidence.md").read_text()
    checked = evidence(project, "check")
    assert (checked.returncode, checked.stderr) == (0, "")


def test_skipped_entries_keep_their_record(project):
    again = evidence(project, "run")
    assert "skipped, $ABSENT_PEER is absent: set ABSENT_PEER to its folder" in again.stdout
    records = json.loads((project / "docs" / "evidence.json").read_text())
    assert records["skipped"]["date"] == "2026-01-01"
    assert records["skipped"]["figures"]["ratio"]["value"] == 2.5
    assert "10 requests take 2.50× the time" in (project / "docs" / "evidence.md").read_text()


def test_only_named_entries_run(project):
    records = json.loads((project / "docs" / "evidence.json").read_text())
    records["fast"]["date"] = "2026-01-01"
    (project / "docs" / "evidence.json").write_text(json.dumps(records))
    assert evidence(project, "run", "long").returncode == 0
    records = json.loads((project / "docs" / "evidence.json").read_text())
    assert records["long"]["date"] > "2026-01-01"
    assert records["fast"]["date"] == "2026-01-01"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("README.md", "-->1.23×<", "-->1.5×<", "fast.ratio is '1.5×', and recorded as '1.23×'"),
        ("README.md", "Needs", "It is 3.7× as fast. Needs", "README.md:3: '3.7×' is not recorded"),
        ("README.md", "Needs", "It serves 12 requests/s. Needs", "'12 requests/s' is not recorded"),
        ("README.md", "Needs", "It is ten times as fast. Needs", "'ten times' is not recorded"),
        ("README.md", "fast.machine", "fast.machin", "fast has no recorded figure 'machin'"),
        ("README.md", "for <!--", "<!--", "begins with a mark"),
        ("README.md", "Python 3.11", "Python", "ALLOWED has 'Python 3.11', which no page contains"),
        ("docs/evidence.md", "1.23×", "1.3×", "docs/evidence.md differs from the recorded results"),
        ("docs/evidence.json", "1.2345678", "1.9", "recorded as '1.90×'"),
        ("entries.py", "python fast.py --long", "python fast.py --longer", "long was recorded with another command"),
        ("entries.py", "Claim of", "5.5× claim of", "entry fast: '5.5×' is not recorded"),
    ],
)
def test_check_rejects_figures_without_a_record(project, file, old, new, message):
    replace(project / file, old, new)
    checked = evidence(project, "check")
    assert checked.returncode == 1
    assert message in checked.stderr


def test_an_entry_without_a_result_is_listed_but_has_no_figures(project):
    replace(project / "entries.py", "ENTRIES = (", 'ENTRIES = (entry("new", "python absent.py"),')
    assert evidence(project, "write").returncode == 0
    assert (
        "| Claim of new | `python absent.py` | no result recorded yet | |" in (project / "docs/evidence.md").read_text()
    )
    replace(project / "README.md", "fast.ratio", "new.ratio")
    assert "new has no recorded result" in evidence(project, "check").stderr


def test_check_ignores_code(project):
    replace(project / "README.md", "7.5 ms", "8.5 ms")
    replace(project / "README.md", "5ms", "6.5ms")
    assert evidence(project, "check").returncode == 0


@pytest.mark.parametrize(
    ("benchmark", "minutes", "message"),
    [
        ("raise SystemExit(3)", 1, "fast: exit status 3"),
        ("pass", 1, "fast: its result has no such figure"),
        ("import time; time.sleep(600)", 0.01, "fast: no end within"),
    ],
)
def test_a_failing_benchmark_is_named_and_the_others_run(project, benchmark, minutes, message):
    (project / "fast.py").write_text(benchmark)
    (project / "absent.py").write_text(BENCHMARK)
    replace(project / "entries.py", 'file("$ABSENT_PEER", "set ABSENT_PEER to its folder")', "lambda: None")
    replace(project / "entries.py", '"python fast.py")', f'"python fast.py", minutes={minutes})')
    failed = evidence(project, "run", "fast", "skipped")
    assert failed.returncode == 1
    assert message in failed.stderr
    records = json.loads((project / "docs" / "evidence.json").read_text())
    assert records["fast"]["figures"]["ratio"]["value"] == 1.2345678
    assert records["skipped"]["figures"]["ratio"]["value"] == 1.2345678


def test_an_unknown_entry_is_refused(project):
    refused = evidence(project, "run", "fats")
    assert refused.returncode == 2
    assert "unknown: fats; known: fast, skipped, long" in refused.stderr


def test_the_pages_of_this_project_show_recorded_figures():
    command = [sys.executable, str(ROOT / "tools" / "evidence.py"), "check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
