"""A plugin for vLLM in the workers of a service: asynchronous scheduling on a CPU, and the most tokens in flight."""

import os
from pathlib import Path

from bench.vllm.async_on_cpu import plugin_path
from bench.vllm.async_on_cpu import register as keep

MOST = "TEST_VLLM_TOKENS_IN_FLIGHT"


def schedule_asynchronously(directory, monkeypatch):
    """Let vLLM in this process's children load the plugin, which writes its results to `directory`."""
    tests = Path(__file__).parents[1]
    path = plugin_path(directory, "support.vllm_async:register")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((path, str(tests), str(tests.parent))))
    monkeypatch.setenv(MOST, str(directory / "most"))


def tokens_in_flight(directory):
    """Return, for each worker, the most tokens of a request that were scheduled and not yet known."""
    return [int(path.read_text()) for path in directory.glob("most.*")]


def register():
    """Keep asynchronous scheduling in this process. vLLM calls it."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    keep()
    update, AsyncScheduler.most = AsyncScheduler._update_after_schedule, 0

    def also_record(self, scheduler_output):
        update(self, scheduler_output)
        counts = [self.requests[each].num_output_placeholders for each in scheduler_output.num_scheduled_tokens]
        if max(counts, default=0) > self.most:
            self.most = max(counts)
            Path(f"{os.environ[MOST]}.{os.getpid()}").write_text(str(self.most))

    AsyncScheduler._update_after_schedule = also_record
