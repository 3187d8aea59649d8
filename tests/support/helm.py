"""Functions that render and lint the Helm chart."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

CHART = Path(__file__).parents[2] / "deploy/helm/twofold"
_KUBERNETES = "1.30.0"  # rendered for this version, because there is no cluster


def rendered(name, values):
    """Render the Helm chart and return its Kubernetes objects by (kind, name)."""
    texts = _by_binary(name, values) if shutil.which("helm") else _by_library(name, values)
    return by_name(each for text in texts for each in yaml.safe_load_all(text) if each)


def by_name(objects):
    """Return Kubernetes objects as a dict by (kind, name)."""
    found = {}
    for each in objects:
        key = each["kind"], each["metadata"]["name"]
        assert key not in found, key
        found[key] = each
    return found


def lint_messages():
    """Return the warnings and errors of `helm lint`."""
    if shutil.which("helm"):
        command = ["helm", "lint", "--strict", str(CHART)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        return [] if ran.returncode == 0 else [ran.stdout + ran.stderr]
    helm = _library()
    return [each for each in helm.lint(str(CHART))["messages"] if each["severity"] in {"WARNING", "ERROR"}]


def _by_binary(name, values):
    command = ["helm", "template", name, str(CHART), "--kube-version", _KUBERNETES, "--values", "-"]
    ran = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ValueError(ran.stderr)
    return [ran.stdout]


def _by_library(name, values):
    helm = _library()
    try:
        with helm.Chart.load(str(CHART)) as chart:
            return list(chart.render(values=values, name=name).values())
    except helm.HelmError as error:
        raise ValueError(str(error)) from error


def _library():
    return pytest.importorskip(
        "helm_python",
        reason="needs helm, or its library: pip install helm-python-sdk (75 MB, so `make test` does without)",
    )
