"""The modules that `TWOFOLD_COMPILE=1` turns into machine code; all else about the package is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import setup

HOT = """
    instance kvcache/accounts kvcache/counts kvcache/leases
    performance/curve
    scheduling/batcher scheduling/cluster scheduling/decode_set scheduling/handoffs scheduling/instance
    scheduling/iteration scheduling/line scheduling/memory scheduling/pools scheduling/queues scheduling/router
    scheduling/sequence
    scheduling/batchers/* scheduling/routers/*
    simulation/cluster simulation/handoffs simulation/instance simulation/kernel simulation/life
    simulation/network simulation/statistics simulation/tally simulation/timing
"""

if os.environ.get("TWOFOLD_COMPILE") == "1":
    from mypyc.build import mypycify

    files = sorted(str(file) for name in HOT.split() for file in Path("src/twofold").glob(f"{name}.py"))
    setup(ext_modules=mypycify(["--follow-imports=silent", *files], opt_level="3"))
else:
    setup()
