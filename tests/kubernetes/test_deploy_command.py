"""`twofold deploy` writes Kubernetes manifests or Helm values."""

import pytest
import yaml
from typer.testing import CliRunner

from support.deployments import PLAN
from twofold.cli.main import app
from twofold.errors import ConfigurationError
from twofold.kubernetes.deploy import values_of
from twofold.kubernetes.objects import objects_of


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


def deploy(*args):
    result = CliRunner().invoke(app, ["deploy", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_manifests_match_the_helm_values(plan):
    """The values of `--format helm` render to the Kubernetes objects of `--format k8s`."""
    values = yaml.safe_load(deploy(plan, "--format", "helm"))
    assert values["workers"]["prefill"]["replicas"] == 3
    manifests = list(yaml.safe_load_all(deploy(plan, "--name", "llm")))
    assert manifests == list(objects_of("llm", values_of(values)))


def test_values_files_override_the_plan(plan, tmp_path):
    for name, text in (
        ("one", "serve: {slo: ttft=1}\nworkers: {decode: {replicas: 7}}"),
        ("two", "serve: {slo: ttft=2}"),
    ):
        (tmp_path / name).write_text(text)
    values = yaml.safe_load(
        deploy(plan, "--format", "helm", "--values", tmp_path / "one", "--values", tmp_path / "two")
    )
    assert values["serve"]["slo"] == "ttft=2"
    assert values["workers"]["decode"]["replicas"] == 7
    assert values["workers"]["decode"]["device"] == "cuda"


def test_output_is_a_file_or_a_directory(plan, tmp_path):
    """`--output DIRECTORY` writes DIRECTORY/manifests.yaml."""
    deploy(plan, "--output", tmp_path / "here.yaml")
    deploy(plan, "--output", tmp_path)
    assert (tmp_path / "here.yaml").read_text() == (tmp_path / "manifests.yaml").read_text() == deploy(plan)


@pytest.mark.parametrize(
    ("args", "text", "sentence"),
    [
        (("--format", "nomad"), "", "choose one of k8s, helm"),
        (("--name", "Llm"), "", "lower-case letters"),
        ((), "serve: {routr: jsq}", "values: serve: .*routr"),
        ((), "- 1", "is not a mapping"),
        ((), "a: [", "is not YAML"),
        (("--output", "/nowhere/at/all"), "", "cannot be written"),
    ],
)
def test_rejects_invalid_arguments_and_values(plan, tmp_path, args, text, sentence):
    if text:
        (tmp_path / "values").write_text(text)
        args = (*args, "--values", tmp_path / "values")
    with pytest.raises(ConfigurationError, match=sentence):
        deploy(plan, *args)


def test_rejects_a_plan_for_simulation_only(plan):
    """A plan is rejected if its router exists only in simulations."""
    plan.write_text(PLAN.replace("router: jsq", "router: splitwise-sim"))
    with pytest.raises(ConfigurationError, match=r"plan\.yaml: the router splitwise-sim is for simulations"):
        deploy(plan)
