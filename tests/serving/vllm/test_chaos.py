"""Workers that run vLLM are killed, stopped and held up at random under load, and no client notices.

TWOFOLD_CHAOS_ROUNDS says how often one is hit; without it, each role once in each way.
"""

import pytest

from serving.test_chaos import SOON, SPLIT, check
from serving.vllm.conftest import ENGINE
from support.running_service import running_service


@pytest.mark.parametrize("flags", [("--handoff", "layer-wise"), ("--handoff", "pull", "--kv-checksums")])
def test_no_client_notices_what_happens_to_workers(flags, vllm_model_dir):
    """One vLLM prefills and one decodes; each comes back with memory of its own, and all blocks are free."""
    given = (*ENGINE, *SOON, "--prefill", "1", "--decode", "1", "--transport", "nixl", *flags)
    with running_service(vllm_model_dir("llama"), *given) as (process, url):
        check(process, url, SPLIT)
