"""Run SplitwiseSim once, from a checkout of it, and say what the run cost.

    PYTHON_OF_SPLITWISE_SIM bench/splitwise/splitwise_sim_driver.py CHECKOUT TRACE FOLDER OVERRIDE...

CHECKOUT is a clone of https://github.com/Mutinifni/splitwise-sim, TRACE a csv of its format, FOLDER where it writes
its output (detailed/0.csv has a row for each request) and the overrides are those of its run.py. Needs what its
modules import (hydra-core, numpy, pandas, scipy, networkx, requests) and nothing of Twofold. Prints one line of JSON: CPU
seconds of its event loop alone, without reading the trace and without writing results, and of the whole process.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict


def configuration(checkout: Path, trace: Path, folder: Path, overrides: list[str]) -> DictConfig:
    """Its configuration as its run.py would compose it, with its own launcher (Ray) left out."""
    OmegaConf.register_new_resolver("eval", eval)  # as its run.py does
    with initialize_config_dir(config_dir=str(checkout / "configs"), version_base=None):
        whole = compose(
            "config",
            overrides=["hydra/launcher=basic", "performance_model=db", f"trace.path={trace}", *overrides],
            return_hydra_config=True,
        )
    with open_dict(whole):
        whole.hydra.runtime.cwd = str(checkout)
        whole.hydra.runtime.output_dir = str(folder)
    HydraConfig.instance().set_config(whole)
    with open_dict(whole):
        del whole["hydra"]
    return whole


def simulator(config: DictConfig) -> Any:  # noqa: ANN401  (its classes have no types)
    """Its simulator, put together as its run.py does."""
    import initialize  # noqa: PLC0415  (a module of the checkout)
    from simulator import TraceSimulator  # noqa: PLC0415

    # The repositories stay referenced by their own modules once they are made.
    for make in (
        initialize.init_hardware_repo,
        initialize.init_model_repo,
        initialize.init_orchestrator_repo,
        initialize.init_performance_model,
        initialize.init_power_model,
    ):
        make(config)
    cluster = initialize.init_cluster(config)
    router = initialize.init_router(config, cluster)
    arbiter = initialize.init_arbiter(config, cluster)
    applications = initialize.init_applications(config, cluster, router, arbiter)
    trace = initialize.init_trace(config)
    for application in applications.values():
        router.add_application(application)
        arbiter.add_application(application)
    made = TraceSimulator(
        trace=trace,
        cluster=cluster,
        applications=applications,
        router=router,
        arbiter=arbiter,
        end_time=config.end_time,
    )
    initialize.init_start_state(
        config, cluster=cluster, applications=applications, router=router, arbiter=arbiter
    )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    checkout, trace, folder = args.checkout.resolve(), args.trace.resolve(), args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "detailed").mkdir(exist_ok=True)
    sys.path.insert(0, str(checkout))
    os.chdir(folder)
    config = configuration(checkout, trace, folder, args.overrides)
    random.seed(config.seed)
    made = simulator(config)
    save, made.save_results = made.save_results, lambda: None  # results are written outside of what is timed
    began = time.process_time()
    made.run()
    event_loop = time.process_time() - began
    save()
    print(json.dumps({"event_loop_cpu_s": event_loop, "process_cpu_s": time.process_time()}))


if __name__ == "__main__":
    main()
