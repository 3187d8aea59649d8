"""Sensitivity of the corrected tables to the cost of mixed iterations.

Twofold's fitted model assumes that an iteration with prompt tokens and decodes reads the weights once: decodes add only
what depends on their number and their contexts. Nobody measured such iterations of BLOOM-176B on these machines. This
script repeats the search for the other extreme, in which decodes cost as much as in an iteration of their own.

    python bench/splitwise/mixed_cost.py
"""

import argparse
import asyncio
from concurrent.futures import Future
from pathlib import Path

from designs import AA, BASELINE_H100, H100_MACHINES, HH, WORKLOADS, Kind
from msgspec.structs import replace
from show import progress, split_name, table, times
from study import BestDesign, Settings, Study, study, timings

from twofold.hardware.catalog import load_catalog
from twofold.hardware.specs import Machine, Model
from twofold.performance.base import PerformanceModel
from twofold.performance.cost import DecodeCost
from twofold.performance.fitted import fitted
from twofold.performance.registry import PERFORMANCE_MODELS
from twofold.planning.evaluation import SimulatedTrial, Trial
from twofold.planning.evaluator import Executor
from twofold.planning.problem import Problem
from twofold.planning.trials import try_trial
from twofold.reporting.output import json_text

SHARED, SEPARATE = "fitted", "fitted-separate"


class SeparateReads(PerformanceModel):
    """The fitted model, with decodes of mixed iterations as expensive as in an iteration without prompts."""

    def __init__(self, model: PerformanceModel) -> None:
        self.name, self.error, self.power = f"{model.name}, separate reads", model.error, model.power
        self._model = model

    def prefill_s(self, tokens: int, squares: int) -> float:
        return self._model.prefill_s(tokens, squares)

    def decode_cost(self, sequences: int) -> DecodeCost:
        return self._model.decode_cost(sequences)

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        cost = self.decode_cost(sequences)
        return self.prefill_s(tokens, squares) + cost.base_s + cost.context_s * context


def separate(model: Model, machine: Machine, tensor_parallel: int) -> PerformanceModel:
    return SeparateReads(fitted(model, machine, tensor_parallel))


class InProcess(Executor):
    """Runs simulations in this process, which has the performance model of this script."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def submit(self, trial: Trial) -> Future[SimulatedTrial | str]:
        done: Future[SimulatedTrial | str] = Future()
        done.set_result(try_trial(self._problem, trial))
        return done

    def __exit__(self, *_: object) -> None:
        pass


async def found(searches: Study, kind: Kind) -> BestDesign:
    if kind.split:
        return await searches.tuned(kind, "iso-power")
    return await searches.capacity(kind, (H100_MACHINES,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="simulated minutes per rate")
    parser.add_argument("--json", type=Path, help="file for all results")
    given = parser.parse_args()
    PERFORMANCE_MODELS[SEPARATE] = separate
    settings, catalog = Settings(minutes=given.minutes), load_catalog()
    timing = timings(settings, catalog)["corrected"]
    rows, by_model = [], []
    for workload in WORKLOADS:
        for name in (SHARED, SEPARATE):
            model = replace(timing, template=replace(timing.template, performance=name))
            with study(model, workload, settings, catalog, InProcess) as searches:
                best = [asyncio.run(found(searches, kind)) for kind in (BASELINE_H100, AA, HH)]
            base, *splits = best
            rates = {"H100": base.rate, **{kind.name: each.rate for kind, each in zip((AA, HH), splits, strict=True)}}
            by_model.append({"workload": workload, "model": name, "rates": rates})
            row = [workload, name, base.design.family.batching, f"{base.rate:.1f}"]
            for each in splits:
                row += [split_name(each.design.counts), f"{each.rate:.1f}", times(each.rate, base.rate)]
            rows.append(row)
            progress(f"{workload}: {name} done")
    header = ("workload", "model", "40 H100", "req/s", "AA", "req/s", "÷ H100", "HH", "req/s", "÷ H100")
    table("Cost of mixed iterations", header, rows)
    if given.json is not None:
        given.json.write_text(json_text(by_model), "utf-8")


if __name__ == "__main__":
    main()
