"""Charts of simulation results."""

import pytest
from plotly.graph_objects import Figure

from support.simulated import histogram, result, run, series, waves
from twofold.instance import Role
from twofold.reporting.chart import PHASE_COLOURS
from twofold.reporting.simulation.charts import latencies, load, membership, overload, power, slowdowns, utilization
from twofold.reporting.simulation.gantt import GanttRuns, gantt
from twofold.reporting.simulation.html import pictures
from twofold.simulation.overload import OverloadResult
from twofold.slo import SPLITWISE, Slo

ONE = result()


def kept(*runs, **limits):
    made = GanttRuns(**limits)
    for each in runs:
        made.run(each)
    return made


@pytest.mark.parametrize("slo", [None, Slo(ttft_s=1.0, tpot_s=0.1, e2e_s=20.0), SPLITWISE])
def test_charts_are_valid_in_plotly(slo):
    drawn = list(pictures("split", ONE, slo, kept(run())))
    assert len({picture.id for picture in drawn}) == len(drawn) == 7
    for picture in drawn:
        figure = Figure(data=picture.traces, layout=picture.layout)
        assert len(figure.data) == len(picture.traces) > 0
        axes = [key for key in picture.layout if key.startswith(("xaxis", "yaxis"))]
        assert all(picture.layout[key]["title"]["text"] for key in axes)
        used = {
            f"{axis[0]}axis{axis[1:]}" for t in picture.traces for axis in (t.get("xaxis", "x"), t.get("yaxis", "y"))
        }
        assert used == set(axes)


def test_loads_are_shown_where_they_were_watched():
    """A simulation without overload control has no chart of loads."""
    told = OverloadResult(rule="early", refusals={}, wasted_prefill_tokens=0, load_correlation=None)
    loads = {"load/prefill": waves(0.5), "load/decode": waves(0.25)}
    watched = result(overload=told, series=result().series | loads)
    assert overload(ONE) is None
    picture = overload(watched)
    Figure(data=picture.traces, layout=picture.layout)
    assert [trace["name"] for trace in picture.traces[:4:2]] == ["prefill", "decode"]


def test_latencies_show_the_distribution_and_the_bounds():
    picture = latencies("split", ONE, Slo(tpot_s=0.1))
    ttft = picture.traces[0]
    middle = min(range(len(ttft["y"])), key=lambda index: abs(ttft["y"][index] - 0.5))
    assert ttft["x"][middle] == pytest.approx(ONE.ttft_s.percentile(50), rel=0.02)
    assert ttft["y"][-1] == 1.0
    (bound,) = [trace for trace in picture.traces if trace["name"] == "SLO"]
    assert (bound["x"], bound["xaxis"]) == ([0.1, 0.1], "x2")


def test_runs_that_measured_nothing_have_no_curve():
    """A latency whose values are all zero has no curve, because the axis is logarithmic."""
    picture = latencies("a", result(tpot_s=histogram(), itl_s=histogram(0.0, 0.0)))
    assert [trace.get("xaxis") for trace in picture.traces if trace["x"]] == ["x", "x4"]


def test_slowdowns_are_drawn_where_there_are_any():
    crosses = [trace for trace in slowdowns("split", ONE, SPLITWISE).traces if trace["mode"] == "markers"]
    assert [trace["x"] for trace in crosses] == [[2.0, 3.0, 6.0], [1.25, 1.5, 5.0], [1.25, 1.5, 5.0]]
    assert crosses[0]["y"] == [0.5, 0.9, 0.99]
    assert slowdowns("a", result(ttft_slowdown=None, tpot_slowdown=None, e2e_slowdown=None)) is None


def test_load_has_a_colour_for_each_phase():
    picture = load(ONE)
    assert len(picture.traces) == 2 * 2 * 2
    colours = {trace["line"]["color"] for trace in picture.traces}
    assert colours == {PHASE_COLOURS[Role.PREFILL], PHASE_COLOURS[Role.DECODE]}
    assert picture.layout["yaxis2"]["title"]["text"] == "Requests in batches"


def test_membership_follows_a_switch():
    """The chart of pool sizes shows the role change of an instance."""
    by_name = {trace["name"]: trace for trace in membership(ONE).traces}
    prefill, mixed = by_name["prefill"], by_name["mixed"]
    held = dict(zip(prefill["x"], zip(prefill["y"], mixed["y"], strict=True), strict=True))
    assert held[0.0] == (2.0, 0.0)
    assert held[2.0] == (1.0, 1.0)
    assert prefill["stackgroup"] == mixed["stackgroup"]


def test_power_is_shown_beside_what_is_provisioned():
    drawn, provisioned = power(result(series={"power_w": series(5000.0)}, tdp_w=10_200.0)).traces
    assert set(drawn["y"]) == {5.0}
    assert provisioned["y"] == [10.2, 10.2]
    assert power(result(series={})) is None


def test_utilization_is_coloured_by_phase():
    (alone,) = utilization("split", ONE).traces
    assert alone["x"] == ["prefill, dgx-h100", "decode, dgx-h100"]
    assert alone["y"] == [50.0, 50.0]
    assert alone["marker"]["color"] == [PHASE_COLOURS[Role.PREFILL], PHASE_COLOURS[Role.DECODE]]


def test_gantt_tells_phases_and_instances_apart():
    """Each instance has a row, even if idle, and each phase has a colour."""
    made = kept(
        run("prefill-10"), run("prefill-9", 0.5, 1.5, decodes=3), run("decode-0", 1.0, 1.25, prompts=0, decodes=7)
    )
    made.role("decode-1", Role.DECODE, 0)
    picture = gantt(made)
    assert [trace["name"] for trace in picture.traces] == ["prefill", "decode", "mixed"]
    assert picture.layout["yaxis"]["categoryarray"] == ["prefill-10", "prefill-9", "decode-1", "decode-0"]
    decode = picture.traces[1]
    assert (decode["base"], decode["x"], decode["customdata"]) == ([1.0], [0.25], [[1, 0, 0, 7, 5600]])


def test_gantt_keeps_no_more_than_its_bound():
    runs = [run("a", at, at + 1.0) for at in range(10)]
    made = kept(*runs[:3], run("b", 2.5, 9.0), run("c", 3.0, 4.0), *runs[3:], limit=3)
    assert [each.instance for each in made.runs] == ["a", "a", "a", "b"]
    assert made.end_s == 3.0
    assert gantt(made).traces[0]["x"][-1] == 0.5


def test_gantt_without_runs_has_no_bars():
    assert gantt(kept()).traces == []
