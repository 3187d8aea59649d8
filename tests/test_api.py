"""The Python API: traces, simulations and plans, with the figures and the errors of the commands."""

import asyncio
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

import twofold
from twofold.cli.main import main

CLUSTER = {"model": "llama-3.1-8b", "cluster": "1xh100@TP1:prefill,1xh100@TP1:decode", "slo": "ttft=1s,tpot=30ms"}
PLANNED = {"model": "llama-3.1-8b", "machines": "h100", "max_machines": 1, "slo": "ttft=1s,tpot=50ms"}
QUICK = {"draws": 0, "min_requests": 50, "duration": 5, "tolerance": 0.2, "jobs": 1}


@pytest.fixture(scope="module")
def trace():
    return twofold.Trace.load("azure-conv", duration=20)


@pytest.fixture(scope="module")
def simulation(trace):
    return twofold.simulate(trace, rate=20, **CLUSTER)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    return twofold.plan("azure-conv", store=tmp_path_factory.mktemp("plan") / "plan.sqlite", **PLANNED, **QUICK)


def said_by(capsys, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["twofold", *words])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr()


def flags(given):
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_importing_twofold_imports_nothing_else():
    code = "import sys; before = set(sys.modules); import twofold; print(*(set(sys.modules) - before))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = {name for name in ran.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names}
    assert names == {"twofold"}


def test_every_export_is_found_and_no_other_name():
    assert {name for name in twofold.__all__ if getattr(twofold, name) is None} == set()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        twofold.nothing  # noqa: B018


def test_a_simulation_has_the_figures_of_the_command(simulation, trace, capsys, monkeypatch):
    words = ("simulate", str(trace.path), "--rate", "20", "--json", *flags(CLUSTER))
    printed = json.loads(said_by(capsys, monkeypatch, *words).out)
    report = json.loads(simulation.report.json())
    assert {**report, "cpu_s": 0} == {**printed, "cpu_s": 0}
    assert simulation.summary["ttft_p99_s"] == printed["latencies_s"]["ttft_s"]["p99"]
    assert simulation.summary["met"] == printed["verdict"]["met"]


def test_requests_are_a_row_each(simulation, trace):
    table = simulation.to_arrow()
    assert len(table) == len(trace) == simulation.summary["arrived"]
    assert set(table["id"].to_pylist()) == {request.id for request in trace.requests}
    good = sum(row["ttft_s"] <= 1.0 and (row["tpot_s"] or 0) <= 0.03 for row in table.to_pylist())
    assert good / len(table) == simulation.summary["slo_attainment"]
    assert pa.table(simulation) == table, "the stream interface of Arrow"


def test_figures_are_those_of_the_report(simulation):
    figures = simulation.figures()
    assert {"latencies", "load", "power", "utilization"} <= set(figures)
    assert figures["latencies"].layout.title.text == "Latencies"
    assert len(figures["latencies"].data[0].x) > 10


def test_notebooks_and_rich_show_the_tables(simulation):
    console = Console(width=120, record=True, file=None)
    with console.capture() as captured:
        console.print(simulation)
    assert "TTFT" in captured.get()
    assert "TTFT" in simulation._repr_mimebundle_((), ())["text/html"]


def test_traces_are_made_of_columns(tmp_path):
    at, prompt, output = np.array([0.0, 0.5, 2.0]), np.array([100, 200, 300]), [10, 20, 30]
    made = twofold.Trace.from_arrivals(at, prompt, output)
    assert made.to_arrow().to_pydict() == {
        "id": ["0", "1", "2"],
        "arrival_s": [0.0, 0.5, 2.0],
        "prompt_tokens": [100, 200, 300],
        "output_tokens": [10, 20, 30],
    }
    assert made.summary.prompt_tokens.mean == 200
    assert twofold.simulate(made, **CLUSTER).summary["completed"] == 3
    read = twofold.Trace.load(made.path, rate=3.0)
    assert read.summary.requests_per_s == pytest.approx(3.0)
    path = made.path
    del made
    assert not path.exists()


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (([], [], []), "empty"),
        (([1.0, 0.5], [9, 9], [9, 9]), "arrives 0.5 s before"),
        (([0.0], [0], [9]), "a prompt has at least one token"),
    ],
)
def test_wrong_columns_are_refused(columns, said):
    with pytest.raises(twofold.UserError, match=said):
        twofold.Trace.from_arrivals(*columns)


@pytest.mark.parametrize(
    "wrong", [{"rate": -1}, {"slo": "x"}, {"router": "nobody"}, {"cluster": "4xz100:mixed"}, {"reference": "z100"}]
)
def test_errors_are_the_sentences_of_the_command(wrong, capsys, monkeypatch):
    given = {"rate": 2, "num_requests": 5, **CLUSTER, **wrong}
    with pytest.raises(twofold.UserError) as raised:
        twofold.simulate("512+64", **given)
    assert f"twofold: {raised.value}\n" == said_by(capsys, monkeypatch, "simulate", "512+64", *flags(given)).err


def test_wrong_names_and_types_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'routr'; did you mean router"):
        twofold.simulate("512+64", routr="jsq")
    with pytest.raises(twofold.UserError, match="--rate 'fast' has another type: give float"):
        twofold.simulate("512+64", rate="fast")
    with pytest.raises(twofold.UserError, match="--slo 3 has another type: give Slo or SlowdownSlo"):
        twofold.simulate("512+64", rate=1, slo=3)


def test_values_of_python_are_taken(tmp_path):
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("model: llama2-70b\npools: [{machine: h100, machines: 1, role: mixed}]\n")
    given = {"slo": twofold.Slo(ttft_s=1.0), "max_num_seqs": np.int64(8), "rate": np.float32(2)}
    made = twofold.simulate("512+64", num_requests=4, event_log=str(tmp_path / "log.jsonl"), cluster=cluster, **given)
    assert made.result.spec.max_num_seqs == 8
    assert (tmp_path / "log.jsonl").is_file()


def test_a_data_frame_needs_its_library(simulation, monkeypatch):
    for name in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(twofold.UserError, match=f"to_{name} needs {name}: pip install {name}"):
            getattr(simulation, f"to_{name}")()


def test_a_plan_has_the_designs_and_the_verdict_of_the_command(planned, capsys, monkeypatch, tmp_path):
    words = ("plan", "azure-conv", "--json", "--store", str(tmp_path / "plan.sqlite"), *flags(PLANNED), *flags(QUICK))
    printed = json.loads(said_by(capsys, monkeypatch, *words).out)
    assert planned.verdict == printed["advice"]["text"]
    rows = planned.to_arrow().to_pylist()
    assert [row["name"] for row in rows] == [choice["design"]["name"] for choice in printed["choices"]]
    assert rows[0]["rate"] == printed["choices"][0]["rate"]
    assert set(planned.figures()) == {"pareto"}


def test_a_plan_runs_beside_the_event_loop_of_a_notebook(planned, tmp_path):
    async def cell():
        return twofold.plan("azure-conv", store=tmp_path / "plan.sqlite", **PLANNED, **QUICK)

    assert asyncio.run(cell()).verdict == planned.verdict


def test_a_script_may_plan_at_its_top_level(tmp_path):
    """The processes of a search do not run the script again."""
    script = tmp_path / "script.py"
    script.write_text(f"import twofold\nprint(twofold.plan('azure-conv', **{PLANNED | QUICK}).verdict)\n")
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(ran.stdout.splitlines()) == 1


def test_signatures_and_docstrings_have_the_flags():
    import inspect

    for function in (twofold.simulate, twofold.plan):
        names = list(inspect.signature(function).parameters)
        assert names[0] == "workload"
        assert {"model", "slo", "router"} <= set(names)
        assert all(f"    {name}: " in function.__doc__ for name in names[1:])
