"""Tests of `twofold serve --cluster FILE`."""

from pathlib import Path

import pytest

from support.tokenizers_for_tests import byte_level
from twofold.cli.serve.config import public_name, service_config
from twofold.cli.serve.settings import ServeSettings
from twofold.errors import ConfigurationError, ModelError, UserError
from twofold.instance import Role

CLUSTER = """
model: llama2-70b
router: round-robin
handoff: by-size
max_num_batched_tokens: 1024
max_num_seqs: 99
block_size: 32
pools:
  - {machines: 2, machine: h100, role: prefill}
  - {machines: 3, machine: a100, role: decode}
"""


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


def emulated(cluster, **flags):
    return service_config(ServeSettings(engine="emulated", cluster=cluster, **flags))


def test_pools_and_policies_come_from_the_file(cluster):
    """An emulated service has the workers, router, hand-off mode and block size of its cluster file."""
    config = emulated(cluster)
    roles = [worker.role for worker in config.workers]
    assert (roles.count(Role.PREFILL), roles.count(Role.DECODE)) == (2, 3)
    assert (config.router, config.handoff) == ("round-robin", "by-size")
    assert (config.engine.block_size, config.engine.max_num_seqs) == (32, 99)
    assert {worker.max_num_batched_tokens for worker in config.workers} == {1024}
    assert config.engine.model == "llama2-70b"


def test_a_real_model_on_the_pools_of_a_file(cluster, tiny_model_dir):
    """The argument MODEL replaces the model of the cluster file."""
    flags = ServeSettings(model=str(tiny_model_dir("llama")), cluster=cluster)
    config = service_config(flags)
    assert config.engine.engine == "torch"
    assert (len(config.workers), config.engine.block_size, config.router) == (5, 32, "round-robin")
    assert all(worker.cores for worker in config.workers)
    assert public_name(flags, config) == tiny_model_dir("llama").name


def test_a_deployment_file_is_a_cluster_file(tmp_path):
    """`--cluster` accepts the deployment file that `twofold plan --output` writes."""
    indented = "".join(f"  {line}\n" for line in CLUSTER.strip().splitlines())
    path = tmp_path / "plan.yaml"
    path.write_text(f"deployment: 1\ncluster:\n{indented}expected: {{}}\n")
    assert len(emulated(path).workers) == 5


def test_the_model_is_called_as_in_the_file(cluster):
    """Without `--served-model-name`, the API uses the model name from the cluster file."""
    flags = ServeSettings(engine="emulated", cluster=cluster)
    assert public_name(flags, service_config(flags)) == "llama2-70b"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"prefill": 1}, "--prefill 1 contradicts"),
        ({"decode": 2}, "which has 3"),
        ({"colocated": 1}, "--colocated 1 contradicts"),
        ({"router": "jsq"}, "which has round-robin"),
        ({"handoff": "serialized"}, "--handoff serialized contradicts"),
        ({"block_size": 16}, "--block-size 16 contradicts"),
        ({"max_num_seqs": 64}, "--max-num-seqs 64 contradicts"),
        ({"max_num_batched_tokens": 2048}, "--max-num-batched-tokens 2048 contradicts"),
        ({"enable_chunked_prefill": True}, "--enable-chunked-prefill contradicts"),
        ({"model": "llama2-70b"}, "MODEL is not used"),
        ({"dtype": "float32"}, "--dtype has no effect"),
        ({"device": "cuda"}, "--device has no effect"),
        ({"kv_cache_memory_bytes": 1}, "--kv-cache-memory-bytes has no effect"),
    ],
)
def test_flags_that_deny_the_file(cluster, flags, said):
    """`twofold serve` rejects flags that contradict the cluster file."""
    with pytest.raises(ConfigurationError, match=said):
        emulated(cluster, **flags)


def test_flags_that_repeat_the_file(cluster):
    """Flags that repeat values of the cluster file have no effect."""
    again = {"prefill": 2, "decode": 3, "colocated": 0, "router": "round-robin", "block_size": 32}
    assert emulated(cluster, **again, enable_chunked_prefill=False) == emulated(cluster)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (ServeSettings(), "give MODEL"),
        (ServeSettings(engine="emulated"), "needs --cluster FILE"),
        (ServeSettings(vocab_size=9), "--vocab-size needs --engine emulated"),
        (ServeSettings(catalog=(Path("c.toml"),)), "--catalog needs --cluster"),
        (ServeSettings(engine="emulated", cluster=Path("nowhere.yaml")), "nowhere.yaml cannot be read"),
    ],
)
def test_flags_that_need_other_flags(flags, said):
    """The error names the missing flag or file."""
    with pytest.raises(UserError, match=said):
        service_config(flags)


def test_a_file_that_cannot_be_served(cluster):
    """`twofold serve` rejects a router that exists only in simulations."""
    cluster.write_text(CLUSTER.replace("round-robin", "splitwise-sim"))
    with pytest.raises(ConfigurationError, match=r"cluster.yaml: the router splitwise-sim is for simulations"):
        emulated(cluster)


def test_a_tokenizer_says_how_many_tokens_there_are(cluster, tmp_path):
    byte_level().backend.save(str(tmp_path / "tokenizer.json"))
    known = byte_level().backend.get_vocab_size()
    assert emulated(cluster, tokenizer=tmp_path).engine.vocab_size == known
    assert emulated(cluster, vocab_size=77).engine.vocab_size == 77


def test_a_directory_without_a_tokenizer(cluster, tmp_path):
    """`twofold serve` rejects a `--tokenizer` directory that has no tokenizer."""
    with pytest.raises((ConfigurationError, ModelError), match="not a directory with a tokenizer"):
        emulated(cluster, tokenizer=tmp_path)
