"""The benchmarks that README and documentation name: their arguments are parsed, and quick ones run in a short form."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from support.documented import PAGES, ROOT

STATEMENTS = sorted({it.text for page in PAGES for it in page.statements if it.benchmark})
# Arguments with which a benchmark takes seconds.
SHORT = {
    "bench/agents.py": "simulated --requests 50 --rate 1",
    "bench/distserve/bursts.py": "--burst 4",
    "bench/distserve/golden.py": "",
    "bench/distserve/saturation.py": "--requests 100",
    "bench/mooncake/index.py": "--instances 100 --blocks 1000",
    "bench/scale/decisions.py": "--instances 10 --decisions 100",
    "bench/scale/staleness.py": "--instances 20 --seconds 1",
    "bench/simulator_scale.py": "--instances 4 --requests 100",
}
# Modules of other projects, in environments of their own.
NOT_HERE = {"needs aisimulate", "needs vllm"}


def arguments(text):
    """Return the script of a statement and its arguments, without those that the page leaves open."""
    text = re.sub(r"[\[\]]", "", text[text.index("bench/") :])
    words = shlex.split(re.sub(r" --\S+ …(?!/)|(?<!\S)…(?!/)", "", text), comments=True)
    return [word.replace("…", "/opt") for word in words]


def test_arguments_are_those_of_the_scripts():
    """One process runs each script up to the end of its argument parsing."""
    done = subprocess.run(
        [sys.executable, "-m", "support.parse_arguments"],
        input=json.dumps([arguments(text) for text in STATEMENTS]),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    wrong = {text: error for text, error in zip(STATEMENTS, errors, strict=True) if error is not None}
    names = {text for text in wrong if len(arguments(text)) == 1}  # of scripts, in prose
    expected = {text for text in names if "arguments are required" in wrong[text]}
    assert {text: wrong[text] for text in wrong.keys() - expected if wrong[text] not in NOT_HERE} == {}
    assert len(wrong) < 10


def test_every_short_form_is_of_a_documented_benchmark():
    assert SHORT.keys() <= {arguments(text)[0] for text in STATEMENTS}


@pytest.mark.parametrize("script", SHORT)
def test_quick_benchmarks_run(script, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *SHORT[script].split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
