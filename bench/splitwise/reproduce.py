"""Reproduce results of Splitwise (ISCA'24) with the performance models of SplitwiseSim and Twofold.

    python bench/splitwise/reproduce.py --headlines       throughput claims of the paper's abstract
    python bench/splitwise/reproduce.py --sets            highest request rate of each cluster design
    python bench/splitwise/reproduce.py                   both parts: --headlines and --sets
    python bench/splitwise/reproduce.py --provisioning [--html PAGE] [--rate 70]         figure 12
    python bench/splitwise/reproduce.py --load [--workload conv] [--rates 40 60 80]      figure 16
    python bench/splitwise/reproduce.py --batch           maximum throughput of batch jobs
    python bench/splitwise/reproduce.py --robustness      highest request rate of designs tuned for another workload

Results labelled `published` use SplitwiseSim's iteration times and scheduling, and match SplitwiseSim request
by request. Results labelled `corrected` use Twofold's scheduling, and iteration times fitted to
SplitwiseSim's profile. The paper's nine SLOs bound latency percentiles relative to an idle DGX-A100.
"""

import argparse
from pathlib import Path

from batch_jobs import batch_jobs
from headlines import headlines
from load import latency_over_load
from provisioning import provisioning
from robustness import robustness
from sets import design_sets, model_errors
from study import Settings

from twofold.hardware.catalog import load_catalog
from twofold.reporting.output import json_text


def main() -> None:
    args = _parser().parse_args()
    settings = Settings(
        minutes=args.minutes,
        jobs=args.jobs,
        model=args.model,
        tolerance=args.tolerance,
        store=args.store,
        traces=args.traces,
        timings=tuple(args.timings),
    )
    catalog = load_catalog()
    chosen = {name for name in _PARTS if getattr(args, name)} or {"headlines", "sets"}
    if "headlines" in chosen:
        headlines(settings, catalog)
    if "sets" in chosen:
        found = design_sets(settings, catalog, [f"iso-{each}" for each in args.equal])
        if args.json is not None:
            args.json.write_text(json_text(found), "utf-8")
    if chosen & {"headlines", "sets"}:
        model_errors(settings, catalog)
    if "provisioning" in chosen:
        provisioning(
            settings,
            catalog,
            kind_name=args.family,
            workload=args.workload,
            rate=args.rate,
            prefill=args.prefill,
            decode=args.decode,
            html=args.html,
        )
    if "load" in chosen:
        latency_over_load(settings, catalog, args.workload, args.rates)
    if "batch" in chosen:
        batch_jobs(settings, catalog, args.workload)
    if "robustness" in chosen:
        robustness(settings, catalog)


_PARTS = ("headlines", "sets", "provisioning", "load", "batch", "robustness")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in _PARTS:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--minutes", type=float, default=2.0, help="simulated minutes per rate")
    parser.add_argument("--jobs", type=int, default=1, help="parallel simulations")
    parser.add_argument("--model", default="bloom-176b", choices=("bloom-176b", "llama2-70b"))
    parser.add_argument("--tolerance", type=float, default=0.02, help="relative step of the rate grid")
    parser.add_argument("--store", type=Path, help="cache file of simulation results")
    parser.add_argument("--traces", type=Path, help="folder with azure-2023-*.csv traces for the lengths")
    names = ("published", "corrected")
    parser.add_argument("--timings", nargs="+", choices=names, default=names, help="timings to simulate")
    parser.add_argument("--workload", default="conv", choices=("conv", "code"))
    parser.add_argument("--family", default="HH", choices=("AA", "HH", "HA", "HHcap"))
    parser.add_argument("--rate", type=float, default=70.0, help="for --provisioning, requests per second")
    parser.add_argument("--prefill", type=int, nargs="+", default=list(range(10, 29, 2)))
    parser.add_argument("--decode", type=int, nargs="+", default=list(range(4, 25, 2)))
    parser.add_argument("--rates", type=float, nargs="+", default=[30, 50, 70, 90, 110, 130])
    equals = ("power", "cost")
    parser.add_argument("--equal", nargs="+", choices=equals, default=equals, help="for --sets, the budgets")
    parser.add_argument("--json", type=Path, help="for --sets, file for the designs and their rates")
    parser.add_argument("--html", type=Path, help="for --provisioning, HTML page with plots")
    return parser


if __name__ == "__main__":
    main()
