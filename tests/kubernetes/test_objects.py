"""The objects: valid by the schemas of Kubernetes, the same by helm, and with commands that there are."""

import kubernetes_validate
import msgspec
import pytest
import yaml

from support.deployments import CASES, MISTAKES
from support.helm import by_name, findings, rendered
from twofold.cli.main import load
from twofold.errors import ConfigurationError
from twofold.kubernetes.deploy import documents, values_of
from twofold.kubernetes.objects import objects_of

KUBERNETES = ("1.30", "1.33")


def made(given, name="tf"):
    """As `kubectl` reads them."""
    objects = list(yaml.safe_load_all(documents(objects_of(name, values_of(given)))))
    return by_name(objects)


def pods(objects):
    return [each["spec"]["template"]["spec"] for each in objects.values() if each["kind"] == "StatefulSet"]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("case", CASES)
def test_valid_by_the_schemas_of_kubernetes(case, version):
    """Every object, strictly: no field that the API does not know. ServiceMonitor is not part of Kubernetes."""
    for each in made(CASES[case]).values():
        if each["kind"] != "ServiceMonitor":
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_helm_makes_the_same(case):
    """Object by object, field by field."""
    ours, helms = made(CASES[case]), rendered("tf", CASES[case])
    assert ours.keys() == helms.keys()
    for key, each in ours.items():
        assert helms[key] == each, key


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_would_not_serve_is_refused(mistake):
    """In a sentence."""
    with pytest.raises(ConfigurationError, match=mistake):
        made(MISTAKES[mistake])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_helm_refuses_the_same(mistake):
    """With the same words."""
    with pytest.raises(ValueError, match=mistake):
        rendered("tf", MISTAKES[mistake])


def test_helm_refuses_what_is_no_value():
    """By the schema."""
    for given in ({"gateway": {"prot": 80}}, {"workers": {"decode": {"replicas": -1}}}, {"engine": "vllm"}):
        with pytest.raises(ConfigurationError, match="values: "):
            values_of(given)
        with pytest.raises(ValueError, match=r"schema|values"):
            rendered("tf", given)


def test_helm_has_nothing_against_the_chart():
    """`helm lint`."""
    assert findings() == []


@pytest.mark.parametrize("case", CASES)
def test_commands_are_those_that_twofold_takes(case):
    """Every flag is one, and its value of its kind."""
    for pod in pods(made(CASES[case])):
        (container,) = pod["containers"]
        assert container["command"] == ["twofold"]
        command, *args = container["args"]
        with load(command).make_context(command, list(args)) as context:
            assert context.params


def test_who_serves():
    """Split unless there are mixed workers only; nobody but the gateway where machines are emulated."""

    def args(case):
        objects = made(CASES[case])
        return {key[1]: each["spec"]["template"]["spec"]["containers"][0]["args"] for key, each in objects.items()
                if each["kind"] == "StatefulSet"}  # fmt: skip

    assert "--prefill=0" in args("as it is")["tf-gateway"]
    assert args("as it is").keys() == {"tf-gateway", "tf-prefill", "tf-decode"}
    assert "--colocated=0" in args("colocated")["tf-gateway"]
    assert args("colocated").keys() == {"tf-gateway", "tf-mixed"}
    assert "--colocated=2" in args("roles that move")["tf-mixed"]
    assert args("emulated").keys() == {"tf-gateway"}


def test_workers_find_the_gateway_and_take_the_key_that_it_has():
    """Before it is ready, at the port it listens on; the key is a copy that only the process's user may read."""
    objects = made(CASES["watched and fenced"])
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
def test_selectors_meet_their_pods(case):
    """Every selector of the release selects pods of it, and volumes are there for what is mounted."""
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


def test_nobody_is_root():
    """Nor may become it, or write to anything but its volumes."""
    for case in CASES.values():
        for pod in pods(made(case)):
            assert pod["securityContext"]["runAsNonRoot"]
            for container in (*pod["containers"], *pod.get("initContainers", ())):
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }


def test_a_new_plan_is_a_new_pod():
    """The gateway's template changes with the plan, and only with what is said."""
    template = [
        msgspec.json.encode(made({"plan": plan})["StatefulSet", "tf-gateway"])
        for plan in ("a: 1", "a: 1", "a: 2")
    ]
    assert template[0] == template[1] != template[2]
