"""A plugin for vLLM in the workers of a service, which counts drafts."""

import json
import os
from pathlib import Path

COUNTS = "TEST_VLLM_DRAFT_COUNTS"


def count_drafts(directory, monkeypatch):
    """Let vLLM in this process's children load the plugin, which writes its counts to `directory`."""
    facts = directory / "twofold_test-1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: twofold-test\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[vllm.general_plugins]\ntest = support.vllm_drafts:register\n")
    paths = [str(directory), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv(COUNTS, str(directory / "counts"))


def draft_counts(directory):
    """Return the numbers of drafted and accepted tokens, and the sum of the drafted token ids."""
    found = [json.loads(path.read_text()) for path in directory.glob("counts.*")]
    return tuple(map(sum, zip(*found, strict=True)))


def register():
    """Count drafts in this process. vLLM calls it."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(Scheduler, "counts"):
        return
    count, update, Scheduler.counts = Scheduler.make_spec_decoding_stats, Scheduler.update_from_output, [0, 0, 0]

    def also_count(self, stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id):
        invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
        self.counts[0] += num_draft_tokens - invalid
        self.counts[1] += num_accepted_tokens
        Path(f"{os.environ[COUNTS]}.{os.getpid()}").write_text(json.dumps(self.counts))
        return count(self, stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id)

    def also_sum(self, scheduler_output, model_runner_output):
        self.counts[2] += sum(map(sum, scheduler_output.scheduled_spec_decode_tokens.values()))  # invalid ones are 0
        return update(self, scheduler_output, model_runner_output)

    Scheduler.make_spec_decoding_stats, Scheduler.update_from_output = also_count, also_sum
