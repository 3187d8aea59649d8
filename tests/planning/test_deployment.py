"""Deployment files, which hold a planned design: round trips, comments and errors."""

import msgspec
import pytest

from support.clusters import dump_cluster
from support.plans import choice, read_deployment
from twofold.cluster.file import load_cluster, read_cluster
from twofold.errors import ConfigurationError
from twofold.planning.deployment import deployment_of, deployment_text, margins
from twofold.planning.design import Design, Family
from twofold.planning.search import Objective
from twofold.simulation.result import Check


@pytest.fixture
def deployments(make_problem):
    """Return a function that makes a split and a colocated deployment for an SLO."""

    def made(slo="ttft=2,tpot=0.1", **more):
        problem = make_problem(slo, **more)
        fast, slow = problem.kind("h100"), problem.kind("a100")
        split = choice(Design(family=Family(kinds=(fast, slow)), counts=(3, 2)), 20.0, 21.5)
        chunked = Family(kinds=(fast,), batcher="chunked-prefill", max_num_batched_tokens=512)
        colocated = choice(Design(family=chunked, counts=(4,)), 12.0)
        return [deployment_of(problem, each, Objective.THROUGHPUT) for each in (split, colocated)]

    return made


def written(path, deployment, comment="A plan.\nIt is good."):
    path.write_text(deployment_text(deployment, comment))
    return path


@pytest.mark.parametrize("slo", ["splitwise", "ttft=2,tpot=0.1,e2e=300s"])
def test_deployments_round_trip_through_files(tmp_path, deployments, slo):
    for deployment in deployments(slo):
        assert read_deployment(written(tmp_path / "deployment.yaml", deployment)) == deployment


def test_files_have_comments_and_no_unset_fields(tmp_path, deployments):
    text = written(tmp_path / "deployment.yaml", deployments()[0]).read_text()
    assert text.startswith("# A plan.\n# It is good.\ndeployment: 2")
    for line in (
        "  - machines: 3  # number of machines",
        "    role: prefill",
        "    tensor_parallel: 8  # accelerators per instance",
        "  highest_rate: 21.5  # highest requests per second within the SLO",
        "  slo: ttft=2s,tpot=0.1s  #",
        "  - 'fitted bloom-176b on dgx-h100 TP8: prefill off by 10.0%, decode off by 2.0%; ",
    ):
        assert any(each.startswith(line) for each in text.splitlines()), line
    assert "null" not in text


def test_its_cluster_is_a_cluster_file(deployments):
    for deployment in deployments():
        assert read_cluster(dump_cluster(deployment.cluster), "cluster.yaml") == deployment.cluster


def test_margins_are_shares_of_the_bound():
    """Headroom is the distance of a value from its bound, relative to the bound."""
    checks = (
        Check(name="a", value=0.8, bound=1.0, met=True),
        Check(name="b", value=0.99, bound=0.9, met=True, at_least=True),
        Check(name="c", value=None, bound=1.0, met=True),
        Check(name="d", value=1.5, bound=1.0, met=False),
    )
    assert [margin.headroom for margin in margins(checks)] == [0.2, 0.1, None, -0.5]


def test_any_text_survives(tmp_path, deployments):
    """Texts with another meaning in YAML, such as "yes", are preserved."""
    deployment = deployments()[0]
    for word in ("yes", "on", "1e3", "null", "a: b # c", '"', "-", "~", "é"):
        provenance = msgspec.structs.replace(deployment.provenance, objective=word, models=(word,))
        changed = msgspec.structs.replace(deployment, provenance=provenance)
        assert read_deployment(written(tmp_path / "deployment.yaml", changed)) == changed


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("machines: 3", "machines: 0", "machines must be at least 1"),
        ("machines: 3", "machines: many", "machines"),
        ("role: prefill", "role: prefil", "prefil"),
        ("machine: dgx-h100", "machine: dgx-b400", "b400"),
        ("cluster:", "cluster: [", "not YAML"),
    ],
)
def test_mistakes_name_the_file_and_the_place(tmp_path, deployments, old, new, words):
    path = written(tmp_path / "deployment.yaml", deployments()[0])
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ConfigurationError) as error:
        load_cluster(path)
    assert str(path) in str(error.value)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
