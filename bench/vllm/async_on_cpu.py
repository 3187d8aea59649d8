"""A plugin of vLLM that keeps asynchronous scheduling on a CPU, where vLLM's platform turns it off as not required.

On a CPU each operation is complete when its call returns. So iterations are scheduled as on a GPU, and do not overlap.
"""

import os
from pathlib import Path
from typing import Any


def plugin_path(folder: Path, function: str = "async_on_cpu:register") -> str:
    """Write metadata of a plugin that calls `function` to a folder. Return the PYTHONPATH with which vLLM finds it."""
    facts = folder / "twofold_async-1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: twofold-async\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(f"[vllm.general_plugins]\ntwofold_async = {function}\n")
    paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))


def register() -> None:
    """Keep asynchronous scheduling in this process. vLLM calls it."""
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415  (vLLM has imported it)

    check = CpuPlatform.check_and_update_config

    def check_and_keep(config: Any) -> None:  # noqa: ANN401  (vLLM's, which has no types here)
        asked = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = staticmethod(check_and_keep)
