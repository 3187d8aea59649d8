"""Measure lookup speed and memory of a prefix index with a thousand instances and millions of blocks.

Each prompt begins with a shared document and continues with its own blocks. Popular documents are cached on more
instances (up to 64). The index is filled to `--blocks` blocks and queried with known and unknown prompts. Prints the
CPU seconds of this process and the growth of its resident memory. A plain Python loop is also timed, to compare
machines.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from twofold.kvcache.index import PrefixIndex
from twofold.kvcache.prefix import KEY_BYTES
from twofold.request import BlockKey

sys.path.append(str(Path(__file__).parents[1]))
from decision_cost import LOOP_ITERATIONS, cpu_seconds, reference_loop

DOCUMENT_BLOCKS, OWN_BLOCKS = 24, 8
MOST_COPIES = 64
QUESTIONS = 20_000
CHUNK = 1_000  # prompts stored per timing interval

Prompt = list[BlockKey]
Where = tuple[str, Prompt]


class Prompts:
    """Generator of reproducible prompts that begin with a shared document."""

    def __init__(self, documents: int, instances: int) -> None:
        self._draw = random.Random(0)
        self._names = [f"prefill-{number}" for number in range(instances)]
        self._documents = [self.fresh(DOCUMENT_BLOCKS) for _ in range(documents)]
        self._weights = list(accumulate(1 / rank for rank in range(1, documents + 1)))

    def fresh(self, blocks: int) -> Prompt:
        """Return new random block keys that no instance has cached."""
        return [self._draw.randbytes(KEY_BYTES) for _ in range(blocks)]

    def known(self) -> Prompt:
        """Return a prompt: a shared document, drawn by popularity, followed by new random blocks."""
        (document,) = self._draw.choices(self._documents, cum_weights=self._weights)
        return document + self.fresh(OWN_BLOCKS)

    def instance(self) -> str:
        return self._draw.choice(self._names)

    def documents(self) -> Iterator[Where]:
        """Yield (instance, document) for every cached copy of a shared document."""
        most = min(MOST_COPIES, len(self._names))
        for rank, document in enumerate(self._documents, start=1):
            for name in self._draw.sample(self._names, max(1, most // rank)):
                yield name, document

    def conversations(self, count: int) -> list[Where]:
        """Return prompts, each with the instance that caches it."""
        return [(self.instance(), self.known()) for _ in range(count)]


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time of repeated calls of one operation on a prefix index.

    `times` is the number of calls, and `cpu_s` is the total CPU seconds. `blocks` is the total number of KV blocks
    stored, found or removed; 0 if the operation removes an instance.
    """

    what: str
    times: int
    blocks: int
    cpu_s: float


def fill(index: PrefixIndex, prompts: Prompts, blocks: int) -> tuple[Work, list[Where]]:
    """Store prompts until the index has `blocks` blocks."""

    def store(stored: list[Where]) -> None:
        for name, keys in stored:
            index.stored(name, keys)

    stored = list(prompts.documents())
    times, told, cpu_s = 0, 0, 0.0
    while True:
        cpu_s += cpu_seconds(partial(store, stored))
        times += len(stored)
        told += sum(len(keys) for _, keys in stored)
        if len(index) >= blocks:
            return Work(what="stored", times=times, blocks=told, cpu_s=cpu_s), stored
        stored = prompts.conversations(CHUNK)


def ask(what: str, questions: list[Prompt], answer: Callable[[Prompt], int]) -> Work:
    """Call the lookup function `answer` for every prompt in `questions`, and measure the CPU time."""
    found = [0]

    def work() -> None:
        total = 0
        for keys in questions:
            total += answer(keys)
        found[0] = total

    cpu_s = cpu_seconds(work)
    return Work(what=what, times=len(questions), blocks=found[0], cpu_s=cpu_s)


def measure(index: PrefixIndex, prompts: Prompts, stored: list[Where]) -> list[Work]:
    """Measure every kind of lookup in the index, and the removal of blocks and of an instance."""
    known = [prompts.known() for _ in range(QUESTIONS)]
    strangers = [prompts.fresh(DOCUMENT_BLOCKS + OWN_BLOCKS) for _ in range(QUESTIONS)]
    name = prompts.instance()

    def remove() -> None:
        for instance, keys in stored:
            index.removed(instance, keys[DOCUMENT_BLOCKS:])

    return [
        ask("prefixes", known, lambda keys: max(index.prefixes(keys).values(), default=0)),
        ask("prefixes of unknown prompts", strangers, lambda keys: max(index.prefixes(keys).values(), default=0)),
        ask("longest prefix of one instance", known, partial(index.prefix, name)),
        Work(what="removed", times=len(stored), blocks=len(stored) * OWN_BLOCKS, cpu_s=cpu_seconds(remove)),
        Work(what="instance lost", times=1, blocks=0, cpu_s=cpu_seconds(partial(index.lost, name))),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=2_000_000)
    args = parser.parse_args()
    prompts = Prompts(max(1, args.blocks // 100), args.instances)
    loops = [cpu_seconds(reference_loop) for _ in range(3)]
    process, index = psutil.Process(), PrefixIndex()
    before = process.memory_info().rss
    filled, stored = fill(index, prompts, args.blocks)
    grown = process.memory_info().rss - before
    known = len(index)
    rows = [filled, *measure(index, prompts, stored)]
    loops += [cpu_seconds(reference_loop) for _ in range(3)]
    turn_s = min(loops) / LOOP_ITERATIONS
    table = Table(
        title=f"{args.instances:,} instances, {known:,} blocks known, reported by {filled.blocks:,} times",
        title_justify="left",
    )
    for heading in ("", "times a CPU s", "µs each", "turns each", "blocks each"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        each_s = row.cpu_s / row.times
        table.add_row(
            row.what,
            f"{row.times / row.cpu_s:,.0f}" if row.cpu_s else "",
            f"{1e6 * each_s:.1f}",
            f"{each_s / turn_s:,.0f}",
            f"{row.blocks / row.times:.1f}",
        )
    console = Console(width=110)
    console.print(table)
    console.print(
        f"{grown / known:,.0f} bytes of memory per block. A plain loop makes {1 / turn_s:,.0f} "
        f"iterations per CPU second (a million took {min(loops) * 1e3:.1f} ms, at most {max(loops) * 1e3:.1f})."
    )


if __name__ == "__main__":
    main()
