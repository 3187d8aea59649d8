"""Streams survive vLLM workers that are killed, stopped and paused at random under load.

TWOFOLD_CHAOS_ROUNDS sets the number of faults; by default, each role gets each fault once.
"""

import pytest

from serving.test_chaos import SOON, SPLIT, check
from serving.vllm.conftest import ENGINE
from support.running_service import running_service


@pytest.mark.parametrize("flags", [("--handoff", "layer-wise"), ("--handoff", "pull", "--kv-checksums")])
def test_streams_survive_faults_of_vllm_workers(flags, vllm_model_dir):
    """Streams are complete and unchanged after faults of vLLM workers, and all blocks are free at the end."""
    given = (*ENGINE, *SOON, "--prefill", "1", "--decode", "1", "--transport", "nixl", *flags)
    with running_service(vllm_model_dir("llama"), *given) as (process, url):
        check(process, url, SPLIT)
