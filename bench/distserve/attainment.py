"""Compare simulated and live SLO attainment by request rate, as in figure 11 of DistServe (OSDI'24).

Serves MODEL on this host with separate prefill and decode workers. `--loads` are multiples of the highest rate at which
90% of requests meet the SLO in simulation. Without --profile (from `twofold calibrate live`), the host is measured
first. Exits with 1 if simulated and live attainment differ by more than five percentage points plus the spread of the
live runs.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from twofold.cli.calibrate import LiveSettings, calibrate_host
from twofold.cli.verify import VerifySettings, compare_all, parse_loads
from twofold.fidelity.comparison import ATTAINMENT, Comparison, speed_text
from twofold.fidelity.service import ServiceDesign
from twofold.slo import Slo


def attainments(comparisons: list[Comparison]) -> tuple[Table, bool]:
    table = Table(title="Share of requests within the SLO", title_justify="left")
    for heading in ("requests/s", "host", "simulated", "live", "difference, points", "between replays"):
        table.add_column(heading, justify="right")
    near = True
    for one in comparisons:
        (figure,) = (each for each in one.figures() if each.name == ATTAINMENT)
        near = near and figure.holds
        table.add_row(
            f"{one.rate:.3g}",
            speed_text(one),
            f"{figure.simulated:.1%}",
            ", ".join(f"{each:.1%}" for each in figure.live),
            f"{figure.error * 100:+.1f}",
            f"{figure.spread * 100:.1f}",
        )
    return table, near


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--workload", default="azure-conv")
    parser.add_argument("--requests", type=int, default=250)
    parser.add_argument("--length-scale", type=float, default=0.125)
    parser.add_argument("--loads", default="0.4,0.7,0.9,1.1,1.4,2")
    parser.add_argument("--slo", default="ttft=1.5,tpot=0.12")
    parser.add_argument("--replays", type=int, default=2)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        profile = flags.profile or Path(directory, "host.yaml")
        if flags.profile is None:
            calibrate_host(LiveSettings(model=flags.model, output=profile))
        comparisons = compare_all(
            VerifySettings(
                target=str(flags.model),
                profile=profile,
                workload=flags.workload,
                num_requests=flags.requests,
                loads=parse_loads(flags.loads, "--loads"),
                length_scale=flags.length_scale,
                slo=Slo.parse(flags.slo),
                replays=flags.replays,
            ),
            ServiceDesign(prefill=flags.prefill, decode=flags.decode),
        )
    table, near = attainments(comparisons)
    Console(width=120).print(table)
    sys.exit(0 if near else 1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
