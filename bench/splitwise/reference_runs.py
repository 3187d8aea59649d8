"""Three simulations with configurations for SplitwiseSim and for Twofold, to compare both simulators."""

from pathlib import Path

import msgspec

from twofold.bench.real_data import data_folder
from twofold.cluster.spec import PoolSpec
from twofold.instance import Role

ROOT = Path(__file__).parents[2]
_MACHINES = 40  # all H100


class ReferenceRun(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of one simulation of 40 machines, run with both SplitwiseSim and Twofold.

    `prefill` is the number of machines that run prefill; the remaining machines run decode. If `prefill` is 0,
    every machine runs prefill and decode.
    """

    name: str
    golden: str  # file with the latencies of SplitwiseSim
    trace: str
    prefill: int = 0

    @property
    def golden_path(self) -> Path:
        return data_folder() / "golden" / "splitwise" / f"{self.golden}.csv"

    @property
    def trace_path(self) -> Path:
        return data_folder() / "traces" / f"splitwise-{self.trace}-70rps-2min.csv"

    @property
    def pools(self) -> tuple[PoolSpec, ...]:
        split = ((self.prefill, Role.PREFILL), (_MACHINES - self.prefill, Role.DECODE))
        return tuple(
            PoolSpec(machines=number, machine="dgx-h100", role=role)
            for number, role in (split if self.prefill else ((_MACHINES, Role.MIXED),))
        )

    @property
    def overrides(self) -> list[str]:
        """Return this run's configuration overrides for SplitwiseSim."""
        cluster = ["cluster=half_half", "cluster.servers.0.count=0", f"cluster.servers.1.count={_MACHINES}"]
        if not self.prefill:
            return [*cluster, "start_state=baseline", "applications.0.scheduler=token_jsq"]
        return [
            *cluster,
            "start_state=splitwise",
            f"start_state.prompt.num_instances={self.prefill}",
            f"start_state.token.num_instances={_MACHINES - self.prefill}",
            "applications.0.scheduler=mixed_pool",
        ]


RUNS = (
    ReferenceRun(name="40 H100 mixed, code", golden="code-70rps-2min-baseline-h100-40", trace="code"),
    ReferenceRun(name="HH 35,5, code", golden="code-70rps-2min-hh-35p5t", trace="code", prefill=35),
    ReferenceRun(name="HH 25,15, conversation", golden="conv-70rps-2min-hh-25p15t", trace="conv", prefill=25),
)
