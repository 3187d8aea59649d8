"""The HTML report contains every chart with its data and needs no network."""

from html.parser import HTMLParser

import msgspec

from support.simulated import ESTIMATED, pool, result, run
from twofold.reporting.simulation.gantt import MOST_RUNS, GanttRuns
from twofold.reporting.simulation.html import html_report
from twofold.simulation.result import verdict
from twofold.slo import SPLITWISE, Slo


class Page(HTMLParser):
    """Parsed HTML report."""

    def __init__(self, text):
        super().__init__()
        self.places, self.data, self.addresses, self.texts = set(), {}, [], []
        self.open, self.closed, self._picture, self._script = [], [], None, False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.addresses += [found[key] for key in ("src", "href") if key in found]
        if tag == "div" and "id" in found:
            self.places.add(found["id"])
        if tag != "meta":
            self.open.append(tag)
        self._script, self._picture = tag in {"script", "style"}, found.get("data-picture")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self._script, self._picture = False, None

    def handle_data(self, data):
        if self._picture:
            self.data[self._picture] = msgspec.json.decode(data)
        elif not self._script:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


def gantt_runs(count):
    made = GanttRuns()
    for index in range(count):
        made.run(run(f"prefill-{index % 40}", index * 0.1, index * 0.1 + 0.09))
    return made


def test_every_picture_has_a_place_and_data():
    text = html_report("split", result(), title="35 + 5 H100", slo=SPLITWISE, runs=gantt_runs(6000))
    page = Page(text)
    expected = {"latencies", "slowdowns", "load", "membership", "power", "utilization", "gantt-0"}
    assert page.places == set(page.data) == expected
    assert all(data["traces"] and data["layout"]["height"] for data in page.data.values())
    assert sum(len(trace["x"]) for trace in page.data["gantt-0"]["traces"]) == MOST_RUNS
    assert len(text.encode()) < 2 << 20
    assert page.open == []


def test_the_page_needs_no_network():
    text = html_report("a", result(), title="t")
    assert Page(text).addresses == []


def test_page_has_design_errors_and_verdict():
    slow = result()
    page = Page(html_report("slow", slow, title="t", slo=SPLITWISE, judged=verdict(slow, SPLITWISE)))
    for expected in (
        "bloom-176b",
        "2 × dgx-h100, 2 instances",
        "±10% prefill, ±2% decode: fitted to 19 measured points",
        "slow:",
        "missed",
        "requests completed 98.00% ≥ 100.00%",
        "TTFT P50 ≤ 2×, P90 ≤ 3×, P99 ≤ 6×",
        "at 30.00 s, back at 60.00 s",
    ):
        assert expected in page.text


def test_the_verdict_and_the_charts_come_before_tables_and_design():
    slow = result()
    text = html_report("slow", slow, title="t", slo=SPLITWISE, judged=verdict(slow, SPLITWISE))
    places = [text.index(part) for part in ("missed", 'id="latencies"', 'id="utilization"', "<h2>SLO<", "<h2>Design<")]
    assert places == sorted(places)
    assert text.index("<h2>Rates, energy and cost<") < places[-1]
    assert '<meta name="viewport" content="width=device-width' in text


def test_pools_of_one_role_share_a_cell():
    """Two prefill pools with different machines are listed in the same table cell."""
    pools = (pool("prefill", 2), pool("prefill", 3, ESTIMATED, "dgx-a100"), pool("decode", 1))
    page = Page(html_report("a", result(pools=pools), title="t", slo=Slo(ttft_s=1.0)))
    assert "2 × dgx-h100, 2 instances; 3 × dgx-a100, 3 instances" in page.text
    assert "estimated, ±25%" in page.text


def test_names_cannot_end_a_script():
    """`</script>` in a run name is escaped."""
    name = "</script><script>alert(1)</script>"
    slow = result()
    page = Page(html_report(name, slow, title=name, slo=SPLITWISE, judged=verdict(slow, SPLITWISE)))
    assert page.text.count(name) > 1
    assert any(trace["name"] == name for trace in page.data["latencies"]["traces"])
