"""Options of vLLM: parsed by vLLM's own parser, and refused where a hand-off cannot work with them."""

import pytest

from twofold.engine.vllm.options import check_phases, parse_options
from twofold.errors import ConfigurationError

REFUSED = {
    "--kv-transfer-config={}": "Twofold's own KV connector carries hand-offs",
    "--kv-offloading-size=4": "Twofold's own KV connector carries hand-offs",
    '--kv-events-config={"publisher":"zmq"}': "the worker collects these events itself",
    "--no-skip-tokenizer-init": "the gateway tokenizes",
    "--distributed-executor-backend=mp": "the KV of a hand-off is in one process",
    "--nnodes=2": "the KV of a hand-off is in one process",
    "--decode-context-parallel-size=2": "the KV of a hand-off is in one process",
    "-tp=2": "tensor_parallel_size cannot be 2 in a worker: give --tp or --pp",
    "-pp=2": "give --tp or --pp",
    "--data-parallel-size=2": "whose workers are replicas",
    "--data-parallel-rank=1": "whose workers are replicas",
    '-sc={"method":"mtp","num_speculative_tokens":2}': "tested with the methods ngram, draft_model, eagle only",
    '-sc={"model":"other","num_speculative_tokens":2}': "tested with the methods ngram, draft_model, eagle only",
    '-sc={"method":"ngram","rejection_sample_method":"block"}': "not tested with rejection_sample_method",
    "--spec-tokens=2": "give speculative_config",
    '--diffusion-config={"canvas_length":4}': "a decode worker starts with one token",
    "--runner=pooling": "the service generates text",
    "--convert=embed": "the service generates text",
    "--logprobs-mode=processed_logprobs": "tokens are sampled by seed and position",
    "--model=other": "give the argument of twofold serve instead",
    "--tokenizer=other": "give the argument of twofold serve instead",
    "--served-model-name=other": "give the argument of twofold serve instead",
    "--block-size=64": "give --block-size",
    "--no-enable-prefix-caching": "give --block-size or --enable-prefix-caching",
    "--max-model-len=auto": "all workers need the same",
}


NGRAM = '-sc={"method":"ngram","num_speculative_tokens":2}'


@pytest.mark.parametrize("option", REFUSED)
def test_refuses_what_a_hand_off_cannot_carry(option):
    with pytest.raises(ConfigurationError, match=r"^vLLM's option \w+ cannot be .* in a worker: [^\n]+$") as refused:
        parse_options([option])
    assert REFUSED[option] in str(refused.value)


def test_accepts_the_values_that_workers_have_anyway():
    flags = ["-tp=1", "--async-scheduling", "--skip-tokenizer-init", "--runner=generate", "--data-parallel-size=1"]
    assert parse_options(flags) == {
        "tensor_parallel_size": 1,
        "async_scheduling": True,
        "skip_tokenizer_init": True,
        "runner": "generate",
        "data_parallel_size": 1,
    }


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--max-logprob=5", "unrecognized arguments: --max-logprob=5"),
        ("--max-logprobs=few", "argument --max-logprobs: invalid int value: 'few'"),
        ("--load-format", "argument --load-format: expected one argument"),
        ("--scheduling-policy=lifo", "argument --scheduling-policy: invalid choice: 'lifo'"),
        ('--compilation-config={"mode":"fast"}', "Invalid compilation mode: fast"),
        ("stray", "unrecognized arguments: stray"),
    ],
)
def test_refuses_unknown_names_and_wrong_types(option, reason):
    with pytest.raises(ConfigurationError, match=r"^vLLM's options: [^\n]+$") as refused:
        parse_options([option])
    assert reason in str(refused.value)


def test_later_options_override_earlier_ones():
    flags = ["--max-num-seqs=4", "--attention-config.backend", "CPU_ATTN", "-O1", "--max-num-seqs=8"]
    found = parse_options(flags)
    assert (found.keys(), found["max_num_seqs"]) == ({"max_num_seqs", "attention_config", "optimization_level"}, 8)


@pytest.mark.parametrize("option", ["--kv-cache-dtype=fp8", "--dtype=float16", "--max-model-len=512", NGRAM])
def test_phases_need_the_same_layout(option):
    (name,) = parse_options([option])
    with pytest.raises(ConfigurationError, match=f"{name} differs between prefill and decode workers"):
        check_phases(parse_options([option]), {})
    check_phases(parse_options([option]), parse_options([option]))


def test_refuses_drafts_with_asynchronous_scheduling():
    with pytest.raises(ConfigurationError, match="async_scheduling is not tested with speculative_config"):
        parse_options([NGRAM, "--async-scheduling"])


def test_accepts_drafts():
    assert parse_options([NGRAM]) == {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}


def test_phases_may_differ_otherwise():
    prefill = parse_options(["--max-num-seqs=4", "--kv-cache-dtype=auto"])
    assert prefill == {"max_num_seqs": 4, "kv_cache_dtype": "auto"}
    check_phases(prefill, {})
