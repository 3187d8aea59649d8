"""The demo's table of runs side by side."""

from demo.comparison import comparison_table

from support.summaries import cells, drawn, run_of
from twofold.reporting.summary import summarize


def test_the_best_value_of_a_row_is_marked():
    text = drawn(comparison_table({"split": run_of(0.2), "colocated": run_of(2.0, failed=1)}))
    assert cells(text, "TTFT P99") == ["TTFT P99", "200.0 ms ◀", "2.00 s"]
    assert cells(text, "Within the SLO")[1:] == ["100.0% ◀", "0.0%"]
    assert cells(text, "Gap between tokens P99")[1:] == ["25.00 ms", "25.00 ms"], "equal values have no mark"


def test_an_empty_run_has_no_best():
    text = drawn(comparison_table({"split": run_of(0.2), "none": summarize([])}))
    assert cells(text, "TTFT P50")[1:] == ["200.0 ms ◀", "-"]
    assert cells(text, "Within the SLO")[1:] == ["100.0% ◀", "-"]
