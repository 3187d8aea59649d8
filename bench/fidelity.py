"""Compare the simulator with the live service for four designs at three request rates.

Runs `twofold verify` on MODEL with two colocated workers, 1P+1D, 2P+1D and 1P+2D: at a low rate, at about the highest
rate within the SLO, and above it. Without --profile (from `twofold calibrate live`), the host is measured before each
design, because the speed of a shared host drifts.
"""

import argparse
import os
import tempfile
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from twofold.cli.calibrate import LiveSettings, calibrate_host
from twofold.cli.verify import VerifySettings, compare_all, parse_loads
from twofold.fidelity.comparison import Comparison, fidelity_table, speed_text
from twofold.fidelity.service import ServiceDesign
from twofold.reporting.output import json_text
from twofold.slo import Slo

DESIGNS = (
    ServiceDesign(colocated=2),
    ServiceDesign(prefill=1, decode=1),
    ServiceDesign(prefill=2, decode=1),
    ServiceDesign(prefill=1, decode=2),
)


def settings(flags: argparse.Namespace, profile: Path) -> VerifySettings:
    return VerifySettings(
        target=str(flags.model),
        profile=profile,
        workload=flags.workload,
        num_requests=flags.requests,
        loads=parse_loads(flags.loads, "--loads"),
        length_scale=flags.length_scale,
        slo=None if flags.slo is None else Slo.parse(flags.slo),
        replays=flags.replays,
    )


def summary(comparisons: list[Comparison]) -> Table:
    """Return a table of simulation errors in %, with the spread of the live runs in brackets."""
    names = [figure.name for figure in comparisons[0].figures()]
    table = Table("", "requests/s", "host", *names, title="Error of the simulation (spread of the replays), %")
    for one in comparisons:
        cells = [
            f"{figure.error * 100:+.0f} ({figure.spread * 100:.0f}){'' if figure.holds else ' *'}"
            for figure in one.figures()
        ]
        table.add_row(one.design, f"{one.rate:.3g}", speed_text(one), *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--workload", default="azure-conv")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--length-scale", type=float, default=0.125)
    parser.add_argument("--loads", default="0.4,0.9,2")
    parser.add_argument("--slo", default="ttft=1.5,tpot=0.12")
    parser.add_argument("--replays", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write all comparisons to this file")
    flags = parser.parse_args()
    console = Console(width=160)
    comparisons: list[Comparison] = []
    with tempfile.TemporaryDirectory() as directory:
        for design in DESIGNS:
            profile = flags.profile or Path(directory, f"{design.name}.yaml")
            if flags.profile is None:
                calibrate_host(LiveSettings(model=flags.model, output=profile))
            of_design = compare_all(settings(flags, profile), design)
            console.print(fidelity_table(of_design))
            comparisons += of_design
    console.print(summary(comparisons))
    figures = [figure for one in comparisons for figure in one.figures()]
    uncorrected = [replace(figure, simulated=figure.calibrated) for figure in figures]
    console.print(
        f"{sum(figure.holds for figure in figures)} of {len(figures)} figures within their limits; "
        f"{sum(figure.holds for figure in uncorrected)} without correction for the host's drift."
    )
    if flags.json is not None:
        held = sum(figure.holds for figure in figures)
        found = {"held": held, "figures": len(figures), "comparisons": comparisons}
        flags.json.write_text(json_text(found), "utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
