"""Predict the deployments of a report of compare.py with aiconfigurator and AISimulate, and compare the errors.

    python bench/silicon/compare.py --rows 900 --json report.json
    …/bin/python bench/silicon/peers.py report.json --rows 100

The second command needs a Python environment of its own with `pip install aisimulate`, and only that. Both peers get
the model, layout, precision and options of the engine, and the concurrency that the simulation of Twofold had.
aiconfigurator's estimate has one length for all prompts, and one for all outputs: the means. AISimulate replays the
same requests in a closed loop.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import fmean, median
from typing import Any

from aisimulate.config.cli import CorePredictionConfig
from aisimulate.legacy_cli.api import cli_estimate
from aisimulate.predict import run_prediction
from aisimulate.stack import resolve_runner_factory
from aisimulate_input import NO_CACHE, ROLES, trace_lines, trace_source
from drawn import SHORTEST, drawn_lengths, rounds

PLAIN = "bfloat16"
Row = dict[str, Any]  # of the report: a deployment with its layouts and options
Times = tuple[float, float]  # mean TTFT and mean TPOT in milliseconds


def concurrency(compared: Row) -> int:
    return int(compared["row"]["silicon_data_source"].partition("silicon_concurrency=")[2].partition(";")[0])


def workers(compared: Row, role: str) -> int:
    return compared["row"].get(f"{role}_num_workers") or 1


def sizes(layout: Row) -> dict[str, int]:
    width = layout["tensor_parallel"] * layout["attention_data_parallel"]
    return {
        "tp_size": layout["tensor_parallel"],
        "pp_size": layout["pipeline_parallel"],
        "attention_dp_size": layout["attention_data_parallel"],
        "moe_tp_size": layout["expert_tensor_parallel"] or width // layout["expert_parallel"],
        "moe_ep_size": layout["expert_parallel"],
    }


def precisions(layout: Row) -> dict[str, str]:
    """Return the precisions that a layout has; the others are those of the checkpoint."""
    names = {"gemm_quant_mode": "gemm", "moe_quant_mode": "experts", "kvcache_quant_mode": "attention"}
    return {name: layout[field] for name, field in names.items() if layout[field]}


def estimated(compared: Row) -> Times:
    """Return the estimate of aiconfigurator."""
    row, layouts = compared["row"], compared["layouts"]
    first = next(iter(layouts.values()))
    lengths = {name: round((1 + SHORTEST) / 2 * row[name]) for name in ("isl", "osl")}
    engine = {"backend_name": first["backend"], **precisions(first)}
    if "mixed" in layouts:
        widths = sizes(first)
        deployed: dict[str, Any] = {
            "batch_size": max(1, round(concurrency(compared) / widths["attention_dp_size"])),
            **widths,
        }
    else:
        deployed = {"mode": "disagg", "prefill_batch_size": 1}
        for role, layout in layouts.items():
            deployed |= {f"{role}_{name}": value for name, value in sizes(layout).items()}
            deployed[f"{role}_num_workers"] = workers(compared, role)
        ranks = workers(compared, "decode") * sizes(layouts["decode"])["attention_dp_size"]
        deployed["decode_batch_size"] = max(1, round(concurrency(compared) / ranks))
    found = cli_estimate(first["model"], first["system"], **lengths, **engine, **deployed)
    return found.ttft, found.tpot


def replayed(compared: Row, most: int, folder: Path) -> Times:
    """Return the prediction of AISimulate for the requests of the benchmark."""
    try:
        return _replayed(compared, most, folder, {})
    except Exception:  # noqa: BLE001  (the package raises many types)
        # For many FP8 checkpoints, it has times of prompts in bfloat16 alone.
        return _replayed(compared, most, folder, {"fmha_quant_mode": PLAIN, "kvcache_quant_mode": PLAIN})


def _replayed(compared: Row, most: int, folder: Path, attention: dict[str, str]) -> Times:
    row, layouts, options = compared["row"], compared["layouts"], compared["options"]
    first, clients = next(iter(layouts.values())), concurrency(compared)
    ranks = max(workers(compared, role) * sizes(layout)["attention_dp_size"] for role, layout in layouts.items())
    trace = folder / "trace.jsonl"
    lengths = drawn_lengths(row["id"], row["isl"], row["osl"], clients * rounds(round(clients / ranks), most))
    trace.write_text("".join(trace_lines((0.0, *each) for each in lengths)))
    names = {"tp_size": "tensor", "pp_size": "pipeline", "attention_dp_size": "attention_data"}
    names |= {"moe_tp_size": "moe_tensor", "moe_ep_size": "moe_expert"}
    config = {
        "traffic": {"source": trace_source(trace), "load": {"type": "concurrency", "concurrency": clients}},
        "engine": {
            "mode": "aggregated" if "mixed" in layouts else "disaggregated",
            "model": first["model"],
            "hardware": first["system"],
            "backend": first["backend"],
            **precisions(first),
            **attention,
            "workers": {
                ROLES[role]: {
                    "parallelism": {
                        "replicas": workers(compared, role),
                        **{names[name]: value for name, value in sizes(layout).items()},
                    },
                    "scheduler": {
                        "max_batched_tokens": options["max_num_batched_tokens"],
                        "max_sequences": compared["batch"] or options["max_num_seqs"] or clients,
                    },
                    "kv_cache": NO_CACHE,
                }
                for role, layout in layouts.items()
            },
        },
    }
    found = run_prediction(
        CorePredictionConfig.model_validate(config), stack="engine", runner_factory=resolve_runner_factory("engine")
    )
    return found.summary["mean_ttft_ms"], found.summary["mean_tpot_ms"]


def predicted(compared: Row, most: int, folder: Path) -> dict[str, Times | None]:
    """Return the times by each method; None where it fails."""
    simulated = compared["simulated"]
    methods: dict[str, Callable[[], Times]] = {
        "twofold": lambda: (simulated["mean_ttft_s"] * 1e3, simulated["mean_tpot_s"] * 1e3),
        "aiconfigurator": lambda: estimated(compared),
        "AISimulate": lambda: replayed(compared, most, folder),
    }
    found: dict[str, Times | None] = {}
    for name, method in methods.items():
        try:
            with redirect_stdout(StringIO()):
                found[name] = method()
        except Exception as error:  # noqa: BLE001  (both packages raise many types)
            print(f"{name} fails for {compared['row']['id']}: {error!r}"[:300], flush=True)
            found[name] = None
    return found


def show(rows: list[tuple[Row, dict[str, Times | None]]]) -> None:
    """Print the errors of each method in the rows that all methods cover."""
    common = [(row, times) for row, times in rows if None not in times.values()]
    print(f"{len(common)} of {len(rows)} rows have results of all methods")
    print(f"{'':16} {'TPOT median':>12} {'mean':>6} {'TTFT median':>12} {'mean':>6} {'failed':>7}")
    for name in next(iter(rows))[1]:
        errors: list[list[float]] = [[], []]
        for row, times in common:
            measured = row["silicon_ttft_ms"], row["silicon_tpot_ms"]
            for each, was, value in zip(errors, measured, times[name] or (), strict=True):
                each.append(abs(value / was - 1))
        ttft, tpot = errors
        failed = sum(times[name] is None for _, times in rows)
        values = f"{median(tpot):12.0%} {fmean(tpot):6.0%} {median(ttft):12.0%} {fmean(ttft):6.0%}"
        print(f"{name:16} {values} {failed:7}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="results of compare.py --json")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--requests", type=int, default=600, help="as given to compare.py")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    compared = json.loads(given.report.read_bytes())["compared"]
    random.Random(given.seed).shuffle(compared)
    with tempfile.TemporaryDirectory() as folder:
        rows = [(each["row"], predicted(each, given.requests, Path(folder))) for each in compared[: given.rows]]
    show(rows)


if __name__ == "__main__":
    main()
