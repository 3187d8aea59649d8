"""The torch engine gives the same output as `generate` of transformers."""

import random

import pytest
import torch

from support.device import DEVICE
from support.engine_driver import drive, token_ids
from support.reference import greedy_outputs
from support.tiny_models import SLIDING_WINDOW
from twofold.engine.base import SequenceStep
from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.loader import load_model
from twofold.engine.torch.pool import KvPool
from twofold.request import SamplingParams

OUTPUT = 12
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0.0)
LENGTHS = (1, 2, 15, 16, 17, SLIDING_WINDOW - 5, SLIDING_WINDOW + 40, 700)
ALL = ("llama", "qwen3", "gpt2", "opt", "gemma2", "mixtral", "gpt_oss", "deepseek_v3")


def prompts_of(lengths, seed=1):
    rng = random.Random(seed)
    return [[rng.randrange(3, 512) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    """Return a function that computes the reference outputs of a given model architecture with `transformers`."""
    known = {}

    def outputs(arch):
        if arch not in known:
            known[arch] = greedy_outputs(tiny_model_dir(arch), prompts_of(LENGTHS), OUTPUT)
        return known[arch]

    return outputs


@pytest.mark.covers(engine="torch", model=ALL, feature=("tokens", "chunked-prefill"))
@pytest.mark.covers(engine="torch", feature=("latent", "windows"))
@pytest.mark.parametrize("arch", ALL)
class TestEqualsGenerate:
    """Greedy output equals the output of `generate` in transformers with eager attention in float32."""

    def test_whole_prompts_at_once(self, arch, engine, expected):
        assert token_ids(drive(engine(arch), prompts_of(LENGTHS), GREEDY)) == expected(arch)

    def test_mixed_iterations_with_odd_chunks(self, arch, engine, expected):
        rng = random.Random(5)
        sizes = lambda: rng.choice((1, 3, 17, 64, 131, 400))  # noqa: E731
        outputs = drive(engine(arch, 600, block_size=5), prompts_of(LENGTHS), GREEDY, chunk=sizes, max_batch=5, seed=2)
        assert token_ids(outputs) == expected(arch)

    def test_contiguous_blocks(self, arch, engine, expected):
        """Attention reads contiguous blocks of a sequence without a copy."""
        chunks = iter([100, 50] * 10_000)
        outputs = drive(engine(arch), prompts_of(LENGTHS), GREEDY, chunk=lambda: next(chunks), scatter=False, seed=3)
        assert token_ids(outputs) == expected(arch)


def test_long_prompt(engine, tiny_model_dir):
    """A prompt of 1,500 tokens gives the same output whether it is computed at once or in chunks."""
    prompts = prompts_of([1500], seed=9)
    reference = greedy_outputs(tiny_model_dir("llama"), prompts, OUTPUT)
    assert token_ids(drive(engine(), prompts, GREEDY)) == reference
    assert token_ids(drive(engine(), prompts, GREEDY, chunk=lambda: 333)) == reference


def test_results_come_in_the_order_of_the_steps(engine):
    """Results are in the order of the input sequences, although the engine packs decodes first."""
    one = engine()
    tables = [[0, 1, 2, 3], [4, 5, 6, 7]]
    prompt, other = prompts_of([40, 9])
    alone = one.run([SequenceStep("a", prompt, 0, tables[0], GREEDY)])[0]
    steps = [
        SequenceStep("b", other, 0, tables[1], GREEDY),
        SequenceStep("a", [alone.token_id], 40, tables[0], GREEDY, 1),
    ]
    together = one.run(steps)
    swapped = one.run(steps[::-1])
    assert together == swapped[::-1]
    assert one.run([steps[0]]) == together[:1]


def test_samples_only_steps_with_sampling_parameters(engine):
    assert engine().run([SequenceStep("a", [5, 6, 7], 0, [0], None)]) == [None]
    assert engine().run([]) == []


def test_on_layer_is_called_in_order_with_the_kv_in_place(engine, loaded):
    """When `on_layer(k)` is called, the KV of layer k is in the KV cache."""
    model = loaded("llama")
    pool = KvPool(model.layout(16), 8, device=DEVICE)
    seen = []

    def on_layer(layer):
        written = [bool(pool.keys(i)[3, :5].abs().sum() > 0) for i in range(len(model.layers))]
        seen.append((layer, written))

    TorchEngine(model, pool).run([SequenceStep("a", [4, 5, 6, 7, 8], 0, [3], GREEDY)], on_layer)
    layers = len(model.layers)
    assert [layer for layer, _ in seen] == list(range(layers))
    assert all(all(written[: layer + 1]) for layer, written in seen)
    if DEVICE == "cpu":
        assert not any(any(written[layer + 1 :]) for layer, written in seen)


def test_writes_only_the_slots_of_its_tokens(engine, loaded):
    model = loaded("llama")
    pool = KvPool(model.layout(16), 8, device=DEVICE)
    for layer in range(len(model.layers)):
        pool.keys(layer).fill_(7.0)
        pool.values(layer).fill_(7.0)
    TorchEngine(model, pool).run([SequenceStep("a", [4] * 20, 0, [5, 2], GREEDY)])
    untouched = torch.ones(8, 16, dtype=torch.bool)
    untouched[5], untouched[2, :4] = False, False
    for layer in range(len(model.layers)):
        assert (pool.keys(layer)[untouched] == 7.0).all()
        assert (pool.values(layer)[untouched] == 7.0).all()


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_oss"])
def test_ignores_garbage_in_unused_memory(arch, engine, loaded, expected):
    model = loaded(arch)
    pool = KvPool(model.layout(16), 320, device=DEVICE)
    for layer in range(len(model.layers)):
        pool.keys(layer).fill_(float("nan"))
        pool.values(layer).fill_(float("nan"))
    outputs = drive(TorchEngine(model, pool), prompts_of(LENGTHS), GREEDY, seed=6)
    assert token_ids(outputs) == expected(arch)


@pytest.mark.covers(engine="torch", model="gemma2", feature="half")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(tiny_model_dir, dtype):
    """Log probabilities in bfloat16 and float16 differ by at most 0.3 from the values in float32."""
    prompts = prompts_of([1, 40, 200])
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    best = {}
    for name in ("float32", dtype):
        model = load_model(tiny_model_dir("gemma2"), dtype=name).to(DEVICE)
        pool = KvPool(model.layout(16), 64, device=DEVICE)
        outputs = drive(TorchEngine(model, pool), prompts, params, chunk=lambda: 33)
        best[name] = [output[0].logprob for output in outputs]
    assert best[dtype] == pytest.approx(best["float32"], abs=0.3)


def test_refuses_the_pool_of_another_model(loaded):
    with pytest.raises(ValueError, match="another model"):
        TorchEngine(loaded("llama"), KvPool(loaded("gpt2").layout(16), 4))


def test_a_shared_block_is_copied_before_it_is_written(engine):
    made = engine()
    (prompt,) = prompts_of([32])
    (cold,) = made.run([SequenceStep("a", prompt, 0, [3, 7], GREEDY)])
    original = [made._pool.keys(layer)[7].clone() for layer in range(len(made.layout.layers))]
    goes_on = SequenceStep("a", [cold.token_id], 32, [3, 7, 11], GREEDY, output_index=1)
    again = SequenceStep("b", prompt[-1:], 31, [3, 9], GREEDY, copies=[(7, 9)])
    warm, _ = made.run([again, goes_on])
    assert warm.token_id == cold.token_id
    assert all(torch.equal(made._pool.keys(layer)[7], keys) for layer, keys in enumerate(original))
