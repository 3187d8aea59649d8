"""Prompts with a prefix loaded from the host's KV store get the same tokens as uncached prompts."""

import random

import pytest

from support.reference import greedy_outputs
from support.store_worker import BLOCK, store_worker
from support.stores import running_store, store_client
from support.waiting import until
from twofold.engine.torch.loader import load_model
from twofold.kvcache.prefix import prefix_keys

OUTPUT = 4
SHARED = 12 * BLOCK


def tokens(seed, count):
    draw = random.Random(seed)
    return [draw.randint(10, 500) for _ in range(count)]


BEGIN = tokens("begin", SHARED)
PROMPT = BEGIN + tokens("end", 5 * BLOCK + 3)
WHOLE = BEGIN[: 8 * BLOCK]


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return load_model(tiny_model_dir("llama"))


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    """Return a function that computes the expected output tokens of a prompt with transformers."""
    known = {}

    def output(prompt):
        if tuple(prompt) not in known:
            (known[tuple(prompt)],) = greedy_outputs(tiny_model_dir("llama"), [prompt], OUTPUT)
        return known[tuple(prompt)]

    return output


@pytest.fixture
def host(tmp_path, model):
    """Yield a KV store that has the blocks of the test prompts' common prefix, and a new client of this store."""
    block_bytes = model.layout(BLOCK).bytes_per_block
    with running_store(tmp_path, slots=64, block_bytes=block_bytes) as store:
        with store_client(tmp_path, "first") as first:
            assert first.wait(600)
            with store_worker(model, first) as worker:
                worker.answer("first", BEGIN, OUTPUT)
                until(lambda: stored(first, BEGIN) == SHARED // BLOCK)
        with store_client(tmp_path, "second") as second:
            assert second.wait(600)
            yield store, second


def stored(client, prompt):
    return client.lookup(list(prefix_keys(prompt, BLOCK))).blocks


def test_a_prompt_runs_while_its_prefix_is_loaded(model, host, expected):
    """The first layer is computed while the second is still loading."""
    _, client = host
    with store_worker(model, client) as worker:
        worker.copier.hold(1)
        worker.submit("a", PROMPT, OUTPUT)
        until(lambda: ("write", 0) in worker.copier.done)
        assert worker.copier.done == [("read", 0), ("write", 0)]
        worker.copier.open()
        assert worker.answer("again", PROMPT, OUTPUT) == (expected(PROMPT), 17 * BLOCK)
        until(lambda: len(worker.outbox.tokens["a"]) == OUTPUT)
        assert (worker.outbox.tokens["a"], worker.outbox.reused["a"]) == (expected(PROMPT), SHARED)
        until(lambda: stored(client, PROMPT) == 17)


def test_a_layer_is_handed_off_when_it_was_loaded(model, host):
    """A layer is ready for hand-off when its cached KV is loaded and its remaining KV is computed, even
    if later layers are still loading.
    """
    _, client = host
    with store_worker(model, client) as worker:
        worker.copier.hold(1)
        worker.submit("a", PROMPT, OUTPUT, target="d")
        until(lambda: ("write", 0) in worker.copier.done)
        outgoing = worker.state.sender._outgoing["a"]
        until(lambda: outgoing.layers_computed == 1)
        worker.copier.open()
        until(lambda: outgoing.layers_computed == worker.copier.layers)
        until(lambda: "a" in worker.outbox.tokens)
        with worker.state.changed:
            worker.state.scheduler.handed_off("a")


def test_prompts_with_the_same_prefix_share_a_load(model, host, expected):
    _, client = host
    other = BEGIN + tokens("other", 9)
    with store_worker(model, client) as worker:
        worker.copier.hold(1)
        worker.submit("a", PROMPT, OUTPUT)
        until(lambda: ("read", 0) in worker.copier.done)
        worker.submit("b", other, OUTPUT)
        worker.submit("c", WHOLE, OUTPUT)
        worker.copier.open()
        for name, prompt, reused in (("a", PROMPT, SHARED), ("b", other, SHARED), ("c", WHOLE, 8 * BLOCK - 1)):
            until(lambda name=name: len(worker.outbox.tokens.get(name, ())) == OUTPUT)
            assert (worker.outbox.tokens[name], worker.outbox.reused[name]) == (expected(prompt), reused)
        assert worker.copier.done.count(("read", 2)) == 1


def test_a_fully_cached_prompt_waits_for_its_last_block(model, host, expected):
    _, client = host
    with store_worker(model, client) as worker:
        most = WHOLE[: -BLOCK + 1]
        assert worker.answer("most", most, OUTPUT) == (expected(most), 7 * BLOCK)
        worker.copier.hold(0)
        worker.submit("a", WHOLE, OUTPUT)
        until(lambda: worker.state.batches_started_s)
        worker.copier.open()
        until(lambda: len(worker.outbox.tokens.get("a", ())) == OUTPUT)
        assert (worker.outbox.tokens["a"], worker.outbox.reused["a"]) == (expected(WHOLE), 8 * BLOCK - 1)
        assert worker.copier.done.count(("read", 0)) == 1


def test_an_abort_does_not_stop_loads_and_puts(model, host, expected):
    """Later prompts reuse the blocks that were loaded or computed for an aborted prompt."""
    _, client = host
    with store_worker(model, client) as worker:
        worker.copier.hold(1)
        worker.submit("a", PROMPT, OUTPUT)
        until(lambda: ("write", 0) in worker.copier.done)
        worker.abort("a")
        worker.copier.open()
        until(worker.idle)
        assert worker.answer("b", PROMPT, OUTPUT) == (expected(PROMPT), 17 * BLOCK)
        assert "a" not in worker.outbox.tokens


def test_a_load_survives_the_death_of_the_store(model, host, expected):
    store, client = host
    with store_worker(model, client) as worker:
        worker.copier.hold(1)
        worker.submit("a", PROMPT, OUTPUT)
        until(lambda: ("read", 0) in worker.copier.done)
        store.pause()
        client._end(client._session)  # as when its process is gone
        worker.copier.open()
        until(lambda: len(worker.outbox.tokens.get("a", ())) == OUTPUT)
        assert (worker.outbox.tokens["a"], worker.outbox.reused["a"]) == (expected(PROMPT), SHARED)


def test_recomputes_corrupt_blocks(model, host, expected):
    store, client = host
    key = list(prefix_keys(PROMPT, BLOCK))[7]
    store.memory.slot(store.manager._blocks[key].slot)[99] ^= 1
    with store_worker(model, client) as worker:
        assert worker.answer("a", PROMPT, OUTPUT) == (expected(PROMPT), 7 * BLOCK)
        assert client.damaged == 1


def test_a_failed_batch_puts_nothing(model, host, expected):
    """The KV of a failed batch is not stored, and the next prompt runs."""
    _, client = host
    with store_worker(model, client) as worker:
        run = worker.engine.run

        def fail(steps, on_layer, _wait_for):
            worker.engine.run = run
            on_layer(0)
            until(lambda: ("write", 0) in worker.copier.done)
            raise RuntimeError("out of memory, say")

        worker.engine.run = fail
        worker.submit("a", PROMPT, OUTPUT)
        until(lambda: "a" in worker.outbox.failed)
        until(worker.idle)
        assert stored(client, PROMPT) == SHARED // BLOCK
        assert worker.answer("b", PROMPT, OUTPUT) == (expected(PROMPT), SHARED)
        until(lambda: stored(client, PROMPT) == 17)


def test_any_order_of_prompts_and_aborts_with_little_memory(model, host, expected):
    """With little memory, outputs stay correct under random prompts and aborts."""
    _, client = host
    draw = random.Random(4)
    prompts = [BEGIN[: BLOCK * draw.randint(2, 12)] + tokens(number, draw.randint(1, 70)) for number in range(12)]
    with store_worker(model, client, num_blocks=20) as worker:
        aborted, asked = set(), []
        for number in range(60):
            name, prompt = str(number), draw.choice(prompts)
            worker.submit(name, prompt, OUTPUT)
            asked.append((name, prompt))
            if draw.random() < 0.3:
                victim = draw.choice(asked)[0]
                worker.abort(victim)
                aborted.add(victim)
            if draw.random() < 0.3:
                until(lambda name=name: name in aborted or name in worker.outbox.tokens)
        for name, prompt in asked:
            if name not in aborted:
                until(lambda name=name: len(worker.outbox.tokens.get(name, ())) == OUTPUT)
                assert worker.outbox.tokens[name] == expected(prompt)
        assert not worker.outbox.failed
        assert ("read", 0) in worker.copier.done
