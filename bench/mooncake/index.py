"""How fast the index of a thousand instances with millions of blocks says who has the longest prefix, and its size.

    python bench/mooncake/index.py [--instances 1000] [--blocks 2000000]

Prompts are made as those of conversations are: each begins with a document, or a history, and goes on with blocks of
its own. Documents are on instances the more the more often they are used (Zipf: the first on 64 of them), and each
prompt's own blocks on one, until so many blocks are known. Then prompts are looked up whose document is drawn alike,
and prompts that nobody has sent. What is asked is made before the clock starts. A fixed loop of plain Python is timed
in the same run, as in reuse.py, because machines differ. CPU seconds are those of this process; memory is what its
resident set grew by, keys and all.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from twofold.bench.decisions import TURNS, cpu_of, loop
from twofold.kvcache.index import PrefixIndex
from twofold.kvcache.prefix import KEY_BYTES
from twofold.request import BlockKey

DOCUMENT_BLOCKS, OWN_BLOCKS = 24, 8
MOST_COPIES = 64
QUESTIONS = 20_000
CHUNK = 1_000  # prompts that are stored between two looks at the clock

Prompt = list[BlockKey]
Where = tuple[str, Prompt]


class Prompts:
    """Documents that prompts begin with, and the instances that have them; all is drawn with a seed."""

    def __init__(self, documents: int, instances: int) -> None:
        self._draw = random.Random(0)
        self._names = [f"prefill-{number}" for number in range(instances)]
        self._documents = [self.fresh(DOCUMENT_BLOCKS) for _ in range(documents)]
        self._weights = list(accumulate(1 / rank for rank in range(1, documents + 1)))

    def fresh(self, blocks: int) -> Prompt:
        """Keys that nobody has."""
        return [self._draw.randbytes(KEY_BYTES) for _ in range(blocks)]

    def known(self) -> Prompt:
        """A prompt whose document is known, and whose end is not."""
        (document,) = self._draw.choices(self._documents, cum_weights=self._weights)
        return document + self.fresh(OWN_BLOCKS)

    def instance(self) -> str:
        return self._draw.choice(self._names)

    def documents(self) -> Iterator[Where]:
        """Each, on each of the instances that have it."""
        most = min(MOST_COPIES, len(self._names))
        for rank, document in enumerate(self._documents, start=1):
            for name in self._draw.sample(self._names, max(1, most // rank)):
                yield name, document

    def conversations(self, count: int) -> list[Where]:
        """Prompts that one instance has to their ends."""
        return [(self.instance(), self.known()) for _ in range(count)]


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Something done `times` times in `cpu_s`, to so many `blocks` in all."""

    what: str
    times: int
    blocks: int
    cpu_s: float


def fill(index: PrefixIndex, prompts: Prompts, blocks: int) -> tuple[Work, list[Where]]:
    """Until so many blocks are known; returns what that took, and some of what was stored."""

    def store(stored: list[Where]) -> None:
        for name, keys in stored:
            index.stored(name, keys)

    stored = list(prompts.documents())
    times, told, cpu_s = 0, 0, 0.0
    while True:
        cpu_s += cpu_of(partial(store, stored))
        times += len(stored)
        told += sum(len(keys) for _, keys in stored)
        if len(index) >= blocks:
            return Work(what="stored", times=times, blocks=told, cpu_s=cpu_s), stored
        stored = prompts.conversations(CHUNK)


def ask(what: str, questions: list[Prompt], answer: Callable[[Prompt], int]) -> Work:
    """`answer` says how many blocks of a prompt were found."""
    found = [0]

    def work() -> None:
        total = 0
        for keys in questions:
            total += answer(keys)
        found[0] = total

    cpu_s = cpu_of(work)
    return Work(what=what, times=len(questions), blocks=found[0], cpu_s=cpu_s)


def measure(index: PrefixIndex, prompts: Prompts, stored: list[Where]) -> list[Work]:
    """Every kind of question, and what makes blocks go."""
    known = [prompts.known() for _ in range(QUESTIONS)]
    strangers = [prompts.fresh(DOCUMENT_BLOCKS + OWN_BLOCKS) for _ in range(QUESTIONS)]
    name = prompts.instance()

    def remove() -> None:
        for instance, keys in stored:
            index.removed(instance, keys[DOCUMENT_BLOCKS:])

    return [
        ask("best", known, lambda keys: index.best(keys)[0]),
        ask("best, of unknown prompts", strangers, lambda keys: index.best(keys)[0]),
        ask("prefixes", known, lambda keys: max(index.prefixes(keys).values(), default=0)),
        ask("prefix of one instance", known, partial(index.prefix, name)),
        Work(what="removed", times=len(stored), blocks=len(stored) * OWN_BLOCKS, cpu_s=cpu_of(remove)),
        Work(what="an instance lost", times=1, blocks=0, cpu_s=cpu_of(partial(index.lost, name))),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=2_000_000)
    args = parser.parse_args()
    prompts = Prompts(max(1, args.blocks // 100), args.instances)
    loops = [cpu_of(loop) for _ in range(3)]
    process, index = psutil.Process(), PrefixIndex()
    before = process.memory_info().rss
    filled, stored = fill(index, prompts, args.blocks)
    grown = process.memory_info().rss - before
    known = len(index)
    rows = [filled, *measure(index, prompts, stored)]
    loops += [cpu_of(loop) for _ in range(3)]
    turn_s = min(loops) / TURNS
    table = Table(
        title=f"{len(index.instances) + 1:,} instances, {known:,} blocks known, told of {filled.blocks:,} times",
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
        f"{grown / known:,.0f} bytes of memory for each block that is known. A plain loop makes {1 / turn_s:,.0f} "
        f"turns in a CPU second (a million took {min(loops) * 1e3:.1f} ms, at most {max(loops) * 1e3:.1f})."
    )


if __name__ == "__main__":
    main()
