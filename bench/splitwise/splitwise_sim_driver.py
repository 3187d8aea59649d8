"""Run SplitwiseSim once from a checkout and print the CPU time of the run.

    PYTHON_OF_SPLITWISE_SIM bench/splitwise/splitwise_sim_driver.py CHECKOUT TRACE FOLDER OVERRIDE...

CHECKOUT is a clone of https://github.com/Mutinifni/splitwise-sim, TRACE a CSV trace in SplitwiseSim's format,
and FOLDER the output folder. OVERRIDE is a configuration override, as on the command line of SplitwiseSim's
run.py. This script needs SplitwiseSim's dependencies, but not Twofold. The output is a line of JSON with the
CPU seconds of the event loop and of the whole process.
"""

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hydra import compose, initialize_config_dir  # type: ignore[import-not-found]
from hydra.core.hydra_config import HydraConfig  # type: ignore[import-not-found]
from omegaconf import DictConfig, OmegaConf, open_dict  # type: ignore[import-not-found]


def configuration(checkout: Path, trace: Path, folder: Path, overrides: list[str]) -> DictConfig:
    """Compose the configuration as SplitwiseSim's run.py does, but without its Ray launcher."""
    OmegaConf.register_new_resolver("eval", eval)  # like its run.py
    configs = folder / "configs"
    shutil.copytree(checkout / "configs", configs, dirs_exist_ok=True)
    top = OmegaConf.load(configs / "config.yaml")
    del top["hydra"]
    top["defaults"] = [one for one in top["defaults"] if "override hydra/launcher" not in one]
    OmegaConf.save(top, configs / "config.yaml")
    with initialize_config_dir(config_dir=str(configs), version_base=None):
        whole = compose(
            "config", overrides=["performance_model=db", f"trace.path={trace}", *overrides], return_hydra_config=True
        )
    with open_dict(whole):
        whole.hydra.runtime.cwd = str(checkout)  # base path of its modules' data
        whole.hydra.runtime.output_dir = str(folder)
    HydraConfig.instance().set_config(whole)
    with open_dict(whole):
        del whole["hydra"]
    return whole


class Simulator(Protocol):
    """Attributes of SplitwiseSim's simulator that this script uses."""

    save_results: Callable[[], None]

    def run(self) -> None: ...


def simulator(config: DictConfig) -> Simulator:
    """Build the simulator as SplitwiseSim's run.py does."""
    # Modules of the checkout.
    import initialize  # type: ignore[import-not-found]  # noqa: PLC0415
    from simulator import TraceSimulator  # type: ignore[import-not-found]  # noqa: PLC0415

    # Their modules keep references to the repositories.
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
    made: Simulator = TraceSimulator(
        trace=trace,
        cluster=cluster,
        applications=applications,
        router=router,
        arbiter=arbiter,
        end_time=config.end_time,
    )
    initialize.init_start_state(config, cluster=cluster, applications=applications, router=router, arbiter=arbiter)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    save, made.save_results = made.save_results, lambda: None  # write results outside the timed section
    began = time.process_time()
    made.run()
    event_loop = time.process_time() - began
    save()
    print(json.dumps({"event_loop_cpu_s": event_loop, "process_cpu_s": time.process_time()}))


if __name__ == "__main__":
    main()
