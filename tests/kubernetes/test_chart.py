"""The generated files of the Helm chart match `values.py`, from which they are generated."""

import json
from itertools import pairwise

import msgspec
import yaml
from tools.chart import schema, table, values_yaml, with_table

import twofold
from support.helm import CHART
from twofold.kubernetes.values import Values


def leaves(values, path=""):
    for key, value in values.items():
        if isinstance(value, dict) and value and path + key != "grafanaDashboard.labels":
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key


def test_generated_files_are_up_to_date():
    assert (CHART / "values.yaml").read_text() == values_yaml()
    assert json.loads((CHART / "values.schema.json").read_text()) == schema()
    readme = (CHART / "README.md").read_text()
    assert with_table(readme) == readme


def test_every_value_is_documented():
    """Each value has a row in the README's table, a description in the schema, and a comment in values.yaml."""
    defaults = yaml.safe_load(values_yaml())
    assert defaults == msgspec.to_builtins(Values())
    rows = table()
    for path in leaves(defaults):
        name = path
        for role in ("prefill", "decode", "mixed"):
            name = name.replace(f"workers.{role}.", "workers.ROLE.")
        assert f"| `{name}` |" in rows, path
    for name, group in schema()["$defs"].items():
        assert group["additionalProperties"] is False, name
        for key, value in group["properties"].items():
            assert value["description"], f"{name}.{key}"
    lines = values_yaml().splitlines()
    for above, line in pairwise(lines):
        assert line.lstrip().startswith("#") or not line or above.lstrip().startswith("#"), line


def test_chart_has_the_version_of_the_package():
    """The chart's appVersion, which is the image tag, is the version of the package."""
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == twofold.__version__


def test_chart_and_package_link_to_the_same_dashboard():
    source = (CHART.parents[1] / "grafana/twofold.json").resolve()
    for link in (CHART / "files/grafana.json", CHART.parents[2] / "src/twofold/kubernetes/data/grafana.json"):
        assert link.resolve() == source
