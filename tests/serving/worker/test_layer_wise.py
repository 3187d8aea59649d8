"""Synchronization of KV loading and computation, layer by layer."""

import threading

from twofold.serving.worker.prefixes import LayerSync, ReadyLayers


def in_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_wait_returns_when_the_layer_is_ready():
    """The wait for a layer ends when this layer or a later one is ready."""
    layers, seen = ReadyLayers(), []
    waiting = in_thread(lambda: seen.append(layers.wait(2)))
    layers.ready(0)
    assert layers.wait(0)
    layers.ready(2)
    waiting.join()
    assert layers.wait(1)
    assert seen == [True]


def test_giving_up_ends_waits():
    """`give_up` ends all waits for layers that are not ready."""
    layers, seen = ReadyLayers(), []
    layers.ready(1)
    waiting = in_thread(lambda: seen.append(layers.wait(2)))
    layers.give_up()
    waiting.join()
    assert seen == [False]
    assert layers.wait(1)
    assert not layers.wait(3)


def test_a_layer_waits_for_all_loads():
    loads, computed, seen = [ReadyLayers(), ReadyLayers()], ReadyLayers(), []
    work = LayerSync(3, loads, computed)
    stores = in_thread(lambda: seen.append(computed.wait(0)))
    computes = in_thread(lambda: (work.wait_for(0), work.computed(0)))
    loads[0].ready(0)
    assert not seen
    loads[1].ready(0)
    computes.join()
    stores.join()
    assert seen == [True]
    waits = in_thread(work.wait_for_loads)
    for load in loads:
        load.ready(2)
    waits.join()
    work.give_up()
    assert not computed.wait(1)
