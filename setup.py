"""Compile the hot modules to machine code if `TWOFOLD_COMPILE=1`. Other package settings are in pyproject.toml."""

import os
import sys
from pathlib import Path

from setuptools import setup

HOT = """
    events instance kvcache/allocator kvcache/cache kvcache/index kvcache/tiers kvcache/eviction/*
    performance/base performance/splitwise_published performance/fitted performance/power
    scheduling/cluster/pools scheduling/instance/batcher
    scheduling/instance/kv_receiver scheduling/cluster/scheduler scheduling/instance/queues
    scheduling/cluster/forecast scheduling/instance/swap_preemption scheduling/instance/scheduler
    scheduling/instance/sequence scheduling/cluster/router scheduling/cluster/shared scheduling/batchers/*
    scheduling/routers/* simulation/cluster simulation/controllers simulation/handoffs simulation/kernel
    simulation/hosted simulation/instance simulation/statistics cluster/timing compat/stagewise
    compat/splitwise_sim
"""

# The package's metadata needs no compilation.
if os.environ.get("TWOFOLD_COMPILE") == "1" and not {"dist_info", "egg_info"} & set(sys.argv):
    from mypyc.build import mypycify

    files = sorted(str(file) for name in HOT.split() for file in Path("src/twofold").glob(f"{name}.py"))
    extensions = mypycify(["--follow-imports=silent", *files], opt_level="3")
    # Functions of the extension can be inlined, and are called directly. Debugging symbols would triple its size.
    flags = ["-fno-semantic-interposition", "-fvisibility=hidden", "-fno-plt", "-g0"]
    for extension in extensions:
        extension.extra_compile_args = [*extension.extra_compile_args, *flags]
    setup(ext_modules=extensions)
else:
    setup()
