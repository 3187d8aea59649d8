"""Tests of `twofold plan --ray`, with a fake Ray cluster."""

import sys

import pytest

from twofold.cli.main import main
from twofold.cli.plan import query, run
from twofold.cli.plan.placement import read_placement_query
from twofold.raycluster.cluster import RayNode

COMMON = ("plan", "azure-conv", "--model", "llama2-70b", "--ray", "auto")


def node(gpus, kind="H100"):
    return RayNode(
        id="n", address="10.0.0.1", total={"GPU": float(gpus), f"accelerator_type:{kind}": 1.0} if gpus else {}
    )


@pytest.fixture
def asked(monkeypatch, capsys):
    """Return a function that runs `twofold plan --ray` on fake nodes."""

    def ask(nodes, *flags):
        queries = []
        monkeypatch.setattr(query, "connect", lambda *_: None)
        monkeypatch.setattr(query, "list_nodes", lambda _: nodes)
        for name, read in (("run_plan", query.read_query), ("run_placement", read_placement_query)):

            def ask_only(problem, settings, read=read):
                queries.append(read(problem, settings))
                sys.exit(0)

            monkeypatch.setattr(run, name, ask_only)
        monkeypatch.setattr(sys, "argv", ["twofold", *COMMON, *flags])
        with pytest.raises(SystemExit) as ended:
            main()
        said = " ".join(capsys.readouterr().err.split())
        return (queries[0] if ended.value.code == 0 else None), said

    return ask


def test_ray_nodes_bound_the_machines_of_the_plan(asked):
    """The plan uses at most the machines of the Ray cluster."""
    question, said = asked([node(8), node(8), node(8, "A100"), node(0)])
    assert question.budget.of_kind == {"dgx-h100": 2, "dgx-a100": 1}
    assert {kind.name for group in question.groups for kind in group[0].kinds} == {"dgx-h100", "dgx-a100"}
    assert "planned for the Ray cluster at auto: dgx-h100=2,dgx-a100=1" in said


def test_goodput_counts_accelerators(asked):
    flags = ("--objective", "goodput", "--slo", "ttft=1,tpot=0.06")
    question, _ = asked([node(8), node(4)], *flags)
    assert question.stock == {"dgx-h100": 12}


def test_machine_flags_replace_the_ray_nodes(asked):
    """With `--machines` or `--max-machines`, the plan ignores the nodes of the Ray cluster."""
    question, said = asked([node(8)], "--machines", "a100")
    assert (question.budget.of_kind, said) == ({}, "")
    question, said = asked([node(0)], "--max-machines", "40")
    assert question.budget.machines == 40


def test_parts_of_machines_are_no_machines(asked):
    question, said = asked([node(4), node(8, "V100")])
    assert question is None
    assert "--objective goodput, which counts accelerators" in said
    assert "left out: 10.0.0.1 has 8 x V100" in said
