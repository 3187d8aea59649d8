"""Workers that run vLLM as actors of a Ray cluster."""

import signal

import pytest

from serving.vllm.conftest import ENGINE
from support.api_client import block_counts
from support.ray_service import QUESTIONS, processes_of, ray_service, under_load
from support.vllm_alone import greedy_by_vllm
from support.waiting import until

pytest.importorskip("ray")

from support.ray_cluster import ray_nodes

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.mark.covers(engine="vllm", model="llama", feature="ray")
def test_streams_equal_one_vllm_while_workers_are_killed(vllm_model_dir, tmp_path):
    """The hosts of killed workers start them again, and every block is freed."""
    model = vllm_model_dir("llama")
    answers = greedy_by_vllm(model, [question["prompt"] for question in QUESTIONS], QUESTIONS[0]["max_tokens"])
    flags = (*ENGINE, "--block-size", "32", "--prefill", "1", "--decode", "1", "--max-restart-delay", "1")
    with ray_nodes(2) as nodes, ray_service(model, nodes.address, tmp_path, *flags) as service:
        before = block_counts(service.url)

        def kill():
            for name in ("decode-0", "prefill-0"):
                (worker,) = processes_of(name)
                worker.send_signal(signal.SIGKILL)
                until(lambda: len(service.up()) < 2)
                until(lambda: len(service.up()) == 2)

        under_load(service, answers, kill)
        assert block_counts(service.url) == before
