"""Charts of a characterization report: the figures of Splitwise's section III for the measured instances."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from twofold.characterize.analysis import Characterization, median_by_size
from twofold.characterize.report.activity import Activity
from twofold.characterize.report.insights import Workloads, is_capped, slowdown
from twofold.performance.fitting.profile import ProfileRow
from twofold.performance.transfer import TransferModel
from twofold.reporting.chart import (
    Layout,
    ReportChart,
    Trace,
    axis,
    bars,
    grid,
    labelled,
    line,
    log_axis,
    markers,
    on,
    rounded,
    run_colour,
)

_DASHES: Final = ("dot", "solid", "dash")
_CONTEXT: Final = 512
_NEAR: Final = 2.0  # a measured context within this factor of `_CONTEXT` is drawn
_POINTS: Final = 60  # of a curve
_SHORT: Final = 64  # prompt tokens from which KV transfers are drawn
_GB: Final = 1e9
_TALL: Final[Layout] = {"height": 420}
_PAIR: Final[Layout] = {**_TALL, "grid": {"rows": 1, "columns": 2, "pattern": "independent", "xgap": 0.24}}

Instances = Sequence[Characterization]


def charts(found: Instances, activity: Mapping[str, Sequence[Activity]], workloads: Workloads) -> list[ReportChart]:
    """Return all charts that have data."""
    drawn = (
        *(latency(found), throughput(found), lengths(workloads), active(activity)),
        *(memory(found), power(found), caps(found), transfer(found)),
    )
    return [chart for chart in drawn if chart is not None]


def _curve(largest: int, value: Callable[[int], float]) -> tuple[list[int], list[float]]:
    sizes = sorted({max(1, round(largest ** (step / _POINTS))) for step in range(_POINTS + 1)})
    return sizes, [value(size) for size in sizes]


def _points(name: str, points: Mapping[int, float], colour: str, plot: int) -> Trace:
    look: Layout = {"color": colour, "size": 7, "symbol": "circle-open"}
    return markers(f"{name}, measured", points, rounded(points.values()), look, showlegend=False, **on(plot))


def latency(found: Instances) -> ReportChart:
    """Plot TTFT by prompt length, and TBT by batch size (Splitwise, figure 5)."""
    traces: list[Trace] = []
    for index, each in enumerate(found):
        colour = run_colour(index)
        alone = (row for row in each.rows if row.prompt_time and row.batch_size == 1)
        ttft = median_by_size((row.prompt_size, row.prompt_time) for row in alone)
        tbt = median_by_size((row.batch_size, row.token_time) for row in _decodes(each))
        longest = max(ttft, default=each.longest_prefill)
        traces.append(line(each.name, *_curve(longest, lambda size, of=each: of.ttft_s(size) * 1e3), colour, **on(0)))  # type: ignore[misc]
        traces.append(_points(each.name, ttft, colour, 0))
        sizes, values = _curve(each.largest_batch, lambda size, of=each: size / of.decode_rate(size, _CONTEXT) * 1e3)  # type: ignore[misc]
        traces.append(line(each.name, sizes, values, colour, showlegend=False, **on(1)))
        traces.append(_points(each.name, tbt, colour, 1))
    axes = [
        (axis("Prompt tokens"), axis("TTFT (ms)", rangemode="tozero")),
        (axis("Batch size (sequences)"), axis("TBT (ms)", rangemode="tozero")),
    ]
    note = f"Circles are measured, lines are the fitted profile; TBT with about {_CONTEXT} tokens of context each."
    return ReportChart(id="latency", title="Latency", note=note, traces=traces, layout=grid(1, 2, axes) | _PAIR)


def _decodes(each: Characterization) -> Iterator[ProfileRow]:
    for row in each.rows:
        if row.token_time and _CONTEXT / _NEAR <= row.mean_context / row.batch_size <= _CONTEXT * _NEAR:
            yield row


def throughput(found: Instances) -> ReportChart:
    """Plot the throughput of each phase by batched tokens, and mark where it saturates (Splitwise, figure 6)."""
    traces: list[Trace] = []
    shapes: list[Layout] = []
    for index, each in enumerate(found):
        colour = run_colour(index)
        prompts = ((row.prompt_size * row.batch_size, row.prompt_time) for row in each.rows if row.prompt_time)
        prefill = median_by_size((tokens, tokens / time * 1e3) for tokens, time in prompts)
        decode = median_by_size((row.batch_size, row.batch_size / row.token_time * 1e3) for row in _decodes(each))
        traces.append(line(each.name, *_curve(each.longest_prefill, each.prefill_rate), colour, **on(0)))
        traces.append(_points(each.name, prefill, colour, 0))
        sizes, values = _curve(each.largest_batch, lambda size, of=each: of.decode_rate(size, _CONTEXT))  # type: ignore[misc]
        traces.append(line(each.name, sizes, values, colour, showlegend=False, **on(1)))
        traces.append(_points(each.name, decode, colour, 1))
        knees = (each.prefill_knee(), each.decode_knee())
        shapes += [_upright(knee, plot, colour) for plot, knee in enumerate(knees) if knee is not None]
    axes = [
        (log_axis("Batched prompt tokens"), axis("Prefill (tokens/s)", rangemode="tozero")),
        (log_axis("Batch size (sequences)"), axis("Decode (tokens/s)", rangemode="tozero")),
    ]
    note = "Dotted lines mark the smallest batch with 95% of the highest throughput."
    layout = grid(1, 2, axes, shapes=shapes) | _PAIR
    return ReportChart(id="throughput", title="Throughput of each phase", note=note, traces=traces, layout=layout)


def _upright(at: float, plot: int, colour: str) -> Layout:
    x, y = on(plot).values()
    ends = {"x0": at, "x1": at, "y0": 0, "y1": 1}
    return {
        "type": "line",
        "xref": x,
        "yref": f"{y} domain",
        **ends,
        "line": {"color": colour, "width": 1, "dash": "dot"},
    }


def _cumulative(values: Iterable[int]) -> tuple[list[int], list[float]]:
    ordered = sorted(values)
    step = max(1, len(ordered) // 200)
    kept = ordered[step - 1 :: step]
    return kept, [(index + 1) * step / len(ordered) for index in range(len(kept))]


def lengths(workloads: Workloads) -> ReportChart | None:
    """Plot the distributions of prompt and output lengths of each workload (Splitwise, figure 3)."""
    traces: list[Trace] = []
    for index, (name, requests) in enumerate(workloads.items()):
        for plot, field in enumerate(("prompt_tokens", "output_tokens")):
            sizes, shares = _cumulative(getattr(request, field) for request in requests)
            traces.append(line(name, sizes, shares, run_colour(index), showlegend=plot == 0, **on(plot)))
    if not traces:
        return None
    share = axis("Share of requests", range=[0, 1.02])
    axes = [(log_axis("Prompt tokens"), share), (log_axis("Output tokens"), share)]
    return ReportChart(id="workloads", title="Prompt and output tokens", traces=traces, layout=grid(1, 2, axes) | _PAIR)


def active(activity: Mapping[str, Sequence[Activity]]) -> ReportChart | None:
    """Plot the cumulative distribution of active tokens over busy time (Splitwise, figure 4)."""
    traces: list[Trace] = []
    for index, (name, runs) in enumerate(activity.items()):
        workloads = list(dict.fromkeys(run.workload for run in runs))
        loads = sorted({run.load for run in runs})
        for run in runs:
            if len(activity) > 1 and run.load != loads[len(loads) // 2]:
                continue
            place = workloads.index(run.workload)
            colour = run_colour(place if len(activity) == 1 else index)
            dash = _DASHES[loads.index(run.load) if len(activity) == 1 else 1 + place % 2]
            label = labelled(name, f"{run.workload}, {run.rate:.3g} requests/s", len(activity))
            steps = run.steps()
            look: Layout = {"width": 1.5, "dash": dash, "shape": "hv"}
            traces.append(line(label, [step[0] for step in steps], [step[1] for step in steps], colour, look))
    if not traces:
        return None
    axes = [(log_axis("Active tokens of the batch"), axis("Share of busy time", range=[0, 1.02]))]
    note = "Simulated with the fitted profile: one colocated instance at 25%, 50% and 75% of its highest throughput."
    return ReportChart(id="active", title="Active tokens", note=note, traces=traces, layout=grid(1, 1, axes) | _TALL)


def memory(found: Instances) -> ReportChart:
    """Plot memory usage by number of tokens in the KV cache (Splitwise, figure 7)."""
    traces: list[Trace] = []
    for index, each in enumerate(found):
        model, capacity = each.profile.model, each.profile.kv_capacity_tokens
        ends = [model.weight_bytes / _GB, (model.weight_bytes + capacity * model.kv_bytes_per_token) / _GB]
        traces.append(line(each.name, [0, capacity], ends, run_colour(index)))
        traces.append(_points(each.name, {capacity: ends[1]}, run_colour(index), 0) | {"name": "KV capacity"})
    axes = [(axis("KV tokens"), axis("Memory (GB)", rangemode="tozero"))]
    note = "Weights and KV cache, computed from the sizes of the model; circles mark the KV capacity."
    return ReportChart(id="memory", title="Memory", note=note, traces=traces, layout=grid(1, 1, axes) | _TALL)


def power(found: Instances) -> ReportChart | None:
    """Plot the power of prefill and the power of decode by batched tokens (Splitwise, figure 8)."""
    traces: list[Trace] = []
    for index, each in enumerate(found):
        rows = [row for row in each.rows if row.peak_power and row.average_power]
        prefill = median_by_size(
            (row.prompt_size * row.batch_size, row.peak_power or 0.0) for row in rows if row.prompt_time
        )
        decode = median_by_size((row.batch_size, row.average_power or 0.0) for row in rows if row.token_time)
        for plot, points in enumerate((prefill, decode)):
            if points:
                drawn = line(each.name, points, points.values(), run_colour(index), showlegend=plot == 0, **on(plot))
                traces.append(drawn | {"mode": "lines+markers"})
    if not traces:
        return None
    share = axis("Power (share of TDP)", rangemode="tozero")
    axes = [(log_axis("Batched prompt tokens"), share), (log_axis("Batch size (sequences)"), share)]
    note = "Left: the peak while prompts are computed. Right: the average while tokens are generated."
    return ReportChart(id="power", title="Power", note=note, traces=traces, layout=grid(1, 2, axes) | _PAIR)


def caps(found: Instances) -> ReportChart | None:
    """Plot TTFT and TBT under power caps, relative to the uncapped instance (Splitwise, figure 9)."""
    pairs = [(each, other) for each in found for other in found if is_capped(other, each)]
    if not pairs:
        return None
    names = [other.name for _, other in pairs]
    ratios = [slowdown(each, other) for each, other in pairs]
    traces = [
        bars(name, names, rounded(ratio[part] for ratio in ratios), run_colour(part))
        for part, name in enumerate(("TTFT, prompt of 1,500 tokens", "TBT, batch of 16"))
    ]
    axes = [(axis(""), axis("Latency relative to no cap", rangemode="tozero"))]
    return ReportChart(id="caps", title="Latency under power caps", traces=traces, layout=grid(1, 1, axes) | _TALL)


def transfer(found: Instances) -> ReportChart | None:
    """Plot the delay of the second token due to the KV transfer, by prompt length (Splitwise, figures 11 and 14)."""
    traces = [trace for index, each in enumerate(found) for trace in _transfers(each, run_colour(index))]
    if not traces:
        return None
    axes = [(log_axis("Prompt tokens"), log_axis("Visible KV transfer (ms)"))]
    note = (
        "Dashed: a whole transfer after the first token. Solid: what remains of it if each layer is sent as soon as "
        "it is computed. Circles: measured delays of the second token."
    )
    return ReportChart(id="transfer", title="KV transfer", note=note, traces=traces, layout=grid(1, 1, axes) | _TALL)


def _transfers(each: Characterization, colour: str) -> Iterator[Trace]:
    link, model = each.profile.link, each.profile.model
    if link is None:
        return
    path = TransferModel(
        kv_bytes_per_token=model.kv_bytes_per_token,
        layers=model.layers,
        bytes_per_s=link.bytes_per_s,
        latency_s=link.latency_s,
        sync_s=link.sync_s,
    )
    sizes = [size for size in _curve(each.longest_prefill, float)[0] if size >= _SHORT]
    whole = [path.serialized_s(size) * 1e3 for size in sizes]
    yield line(f"{each.name}, serialized", sizes, whole, colour, {"width": 1.5, "dash": "dash"})
    if link.layer_wise:
        visible = [path.layer_wise_s(size, each.ttft_s(size)) * 1e3 for size in sizes]
        yield line(f"{each.name}, layer-wise", sizes, visible, colour)
    measured = median_by_size((row.prompt_size, row.transfer_time) for row in each.rows if row.transfer_time)
    if measured:
        yield _points(each.name, measured, colour, 0)
