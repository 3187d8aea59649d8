"""The modules that `TWOFOLD_COMPILE=1` turns into machine code; all else about the package is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import setup

HOT = """
    instance kvcache/accounts kvcache/cache kvcache/counts kvcache/index kvcache/leases kvcache/pins kvcache/tiers
    kvcache/watcher kvcache/eviction/*
    performance/alone performance/base performance/curve performance/fitted performance/power
    performance/splitwise_published
    scheduling/amounts scheduling/batcher scheduling/cells scheduling/chunked_pipeline scheduling/cluster
    scheduling/decode_set scheduling/forecast scheduling/growth scheduling/handoffs scheduling/instance
    scheduling/iteration scheduling/line scheduling/memory scheduling/pipeline scheduling/pools scheduling/prediction
    scheduling/queues scheduling/route scheduling/router scheduling/sequence scheduling/shared_cluster
    scheduling/batchers/* scheduling/routers/*
    simulation/cluster simulation/controllers simulation/handoffs simulation/host simulation/hosted
    simulation/instance simulation/kernel simulation/life simulation/network simulation/pipeline simulation/product
    simulation/stagewise simulation/statistics simulation/tally simulation/timing
"""

if os.environ.get("TWOFOLD_COMPILE") == "1":
    from mypyc.build import mypycify

    files = sorted(str(file) for name in HOT.split() for file in Path("src/twofold").glob(f"{name}.py"))
    extensions = mypycify(["--follow-imports=silent", *files], opt_level="3")
    for extension in extensions:
        extension.extra_compile_args.append("-fno-semantic-interposition")  # lets it inline its own functions
    setup(ext_modules=extensions)
else:
    setup()
