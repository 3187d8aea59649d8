"""Streams survive faults of vLLM workers; TWOFOLD_CHAOS_ROUNDS sets the number of faults."""

import pytest

from serving.test_chaos import SOON, SPLIT, check
from serving.vllm.conftest import ENGINE
from support.running_service import running_service


@pytest.mark.covers(engine="vllm", model="llama", feature="replay")
@pytest.mark.parametrize("flags", [("--handoff", "layer-wise"), ("--handoff", "pull", "--kv-checksums")])
def test_streams_survive_faults_of_vllm_workers(flags, vllm_model_dir):
    given = (*ENGINE, *SOON, "--prefill", "1", "--decode", "1", "--transport", "nixl", *flags)
    with running_service(vllm_model_dir("llama"), *given) as (process, url):
        check(process, url, SPLIT)
