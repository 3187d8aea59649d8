"""Another process with a KV cache of its own, for tests of transports: it does what it is told, and can be killed."""

import multiprocessing
import os
from contextlib import contextmanager

import torch

from twofold.transport.pooled import load_transport


class CachePeer:
    """Calls of `do(what, *arguments)` run in the other process, on its `Cache`."""

    def __init__(self, name):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_obey, args=(name, theirs), daemon=True)
        self.process.start()

    def do(self, what, *arguments):
        self._pipe.send((what, arguments))
        return self._pipe.recv()

    def kill(self):
        self.process.kill()
        self.process.join()


class Cache:
    """A transport and what it holds, in whichever process."""

    def __init__(self, name):
        self.name = name

    def make(self, transport, epoch, layout, num_blocks):
        self.transport = load_transport(transport)(self.name, epoch, layout, num_blocks, "cpu")
        return self.transport.descriptor

    def fill(self, seed):
        """Random contents, the same for the same seed and layout."""
        torch.manual_seed(seed)
        for layer in range(len(self.transport.engine_pool.layout.layers)):
            for part in self.transport.engine_pool.block_rows(layer):
                part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))

    def rows(self):
        """Each layer's blocks as bytes, keys and values."""
        pool = self.transport.landing_pool
        return [torch.cat(pool.block_rows(k), dim=1).numpy().copy() for k in range(len(pool.layout.layers))]


def _obey(name, pipe):
    torch.set_num_threads(1)
    cache = Cache(name)
    while True:
        what, arguments = pipe.recv()
        if what == "end":
            os._exit(0)
        pipe.send(getattr(cache, what)(*arguments))


@contextmanager
def cache_peer(name):
    peer = CachePeer(name)
    try:
        yield peer
    finally:
        peer.kill()
