"""Kubernetes objects are valid, and equal to the objects that Helm renders."""

import kubernetes_validate
import msgspec
import pytest
import yaml

from support.deployments import CASES, MISTAKES
from support.helm import by_name, lint_messages, rendered
from twofold.cli.main import load
from twofold.errors import ConfigurationError
from twofold.kubernetes.deploy import documents, values_of
from twofold.kubernetes.objects import objects_of

KUBERNETES = ("1.30", "1.33")


def made(given, name="tf"):
    """Return the Kubernetes objects of a release with the given Helm values, by (kind, name)."""
    objects = list(yaml.safe_load_all(documents(objects_of(name, values_of(given)))))
    return by_name(objects)


def pods(objects):
    return [each["spec"]["template"]["spec"] for each in objects.values() if each["kind"] == "StatefulSet"]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("case", CASES)
def test_objects_are_valid_by_the_kubernetes_schemas(case, version):
    for each in made(CASES[case]).values():
        # Kubernetes has no schema for ServiceMonitor.
        if each["kind"] != "ServiceMonitor":
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_helm_renders_equal_objects(case):
    ours, helms = made(CASES[case]), rendered("tf", CASES[case])
    assert ours.keys() == helms.keys()
    for key, each in ours.items():
        assert helms[key] == each, key


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rejects_values_that_cannot_serve(mistake):
    with pytest.raises(ConfigurationError, match=mistake):
        made(MISTAKES[mistake])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_helm_rejects_the_same_values(mistake):
    with pytest.raises(ValueError, match=mistake):
        rendered("tf", MISTAKES[mistake])


def test_schema_rejects_unknown_and_invalid_values():
    for given in ({"gateway": {"prot": 80}}, {"workers": {"decode": {"replicas": -1}}}, {"engine": "vllm"}):
        with pytest.raises(ConfigurationError, match="values: "):
            values_of(given)
        with pytest.raises(ValueError, match=r"schema|values"):
            rendered("tf", given)


def test_chart_passes_helm_lint():
    assert lint_messages() == []


@pytest.mark.parametrize("case", CASES)
def test_container_commands_parse(case):
    for pod in pods(made(CASES[case])):
        (container,) = pod["containers"]
        assert container["command"] == ["twofold"]
        command, *args = container["args"]
        with load(command).make_context(command, list(args)) as context:
            assert context.params


def test_pods_follow_the_roles_with_replicas():

    def args(case):
        objects = made(CASES[case])
        return {key[1]: each["spec"]["template"]["spec"]["containers"][0]["args"] for key, each in objects.items()
                if each["kind"] == "StatefulSet"}  # fmt: skip

    assert "--prefill=0" in args("defaults")["tf-gateway"]
    assert args("defaults").keys() == {"tf-gateway", "tf-prefill", "tf-decode"}
    assert "--colocated=0" in args("colocated")["tf-gateway"]
    assert args("colocated").keys() == {"tf-gateway", "tf-mixed"}
    assert "--colocated=2" in args("moving roles")["tf-mixed"]
    assert args("emulated").keys() == {"tf-gateway"}


def test_workers_reach_the_gateway_with_the_cluster_key():
    objects = made(CASES["monitoring and network policy"])
    bus = objects["Service", "tf-bus"]["spec"]
    assert bus["publishNotReadyAddresses"]
    assert bus["ports"][0]["port"] == 7000
    for pod in pods(objects):
        args = pod["containers"][0]["args"]
        assert "--cluster-key=/run/twofold/cluster.key" in args
        assert pod["initContainers"][0]["command"][:3] == ["install", "-m", "0400"]
        assert {"name": "cluster-key", "secret": {"secretName": "tf-cluster-key"}} in pod["volumes"]
    args = [pod["containers"][0]["args"] for pod in pods(objects)]
    assert ["tcp://tf-bus:7000" in each for each in args] == ["join" in each for each in args]


@pytest.mark.parametrize("case", CASES)
def test_selectors_match_pods_and_mounts_match_volumes(case):
    objects = made(CASES[case])
    templates = [each["spec"]["template"] for each in objects.values() if each["kind"] == "StatefulSet"]
    for each in objects.values():
        spec = each.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector")
        if selector is None or each["kind"] == "ServiceMonitor":
            continue
        wanted = selector.get("matchLabels", selector).items()
        assert any(wanted <= template["metadata"]["labels"].items() for template in templates), each
    for key, each in objects.items():
        if each["kind"] == "StatefulSet":
            pod = each["spec"]["template"]["spec"]
            claims = [claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", ())]
            there = {*(volume["name"] for volume in pod["volumes"]), *claims}
            for container in (*pod["containers"], *pod.get("initContainers", ())):
                assert {mount["name"] for mount in container["volumeMounts"]} <= there, key


def test_containers_run_unprivileged():
    for case in CASES.values():
        for pod in pods(made(case)):
            assert pod["securityContext"]["runAsNonRoot"]
            for container in (*pod["containers"], *pod.get("initContainers", ())):
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }


def test_a_new_plan_restarts_the_gateway():
    """The gateway's StatefulSet changes with the plan, so Kubernetes restarts the pod."""
    template = [
        msgspec.json.encode(made({"plan": plan})["StatefulSet", "tf-gateway"]) for plan in ("a: 1", "a: 1", "a: 2")
    ]
    assert template[0] == template[1] != template[2]
