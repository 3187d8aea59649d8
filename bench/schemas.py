"""Compile the JSON schemas of a public collection, and check random answers that they allow.

    git clone https://github.com/guidance-ai/jsonschemabench
    python bench/schemas.py jsonschemabench/maskbench/data --count 500

Each file has a schema, and instances that are valid or not. For each schema, the script measures the time to compile
it, checks whether valid instances are allowed and invalid ones are not, and follows a random answer: at each step, one
of the allowed tokens. Every answer that ends is validated by the package jsonschema. The tokenizer is made on the spot.

Exits with 1 if an answer that ended is not valid.
"""

import argparse
import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
from rich.console import Console

from twofold.engine.grammar import GrammarError, GrammarMatchers, allowed_tokens
from twofold.engine.model_factory import train_tokenizer
from twofold.request import Constraint, ConstraintKind

VOCABULARY, CONTEXT, CORPUS = 4096, 8192, 400_000
LONGEST = 2000  # tokens of an answer


class Report(msgspec.Struct, kw_only=True):
    """Results of one run."""

    schemas: int = 0
    refused: Counter[str] = msgspec.field(default_factory=Counter)  # by the beginning of the reason
    compile_s: list[float] = []
    mask_s: list[float] = []
    ended: int = 0
    invalid: list[str] = []  # files whose answer ended and is not valid
    too_complex: int = 0
    instances: Counter[str] = msgspec.field(default_factory=Counter)  # by validity and whether they are allowed


class Walker:
    """Follows answers with a small tokenizer."""

    def __init__(self) -> None:
        tokenizer = train_tokenizer(VOCABULARY, CONTEXT, corpus_characters=CORPUS)
        self._backend = tokenizer.backend_tokenizer
        self._size, self._end = self._backend.get_vocab_size(), int(tokenizer.eos_token_id)
        self.grammars = GrammarMatchers(self._backend.to_str, self._size, [self._end])

    def allowed(self, name: str, constraint: Constraint, output: list[int]) -> list[int]:
        found: list[int] = (
            allowed_tokens(self.grammars.allowed(name, constraint, output), self._size).nonzero()[0].tolist()
        )
        return found

    def answer(self, name: str, constraint: Constraint, report: Report) -> str | None:
        """Return a random answer, or None if it does not end within `LONGEST` tokens. Raises GrammarError."""
        draw, output = random.Random(name), list[int]()
        while len(output) < LONGEST:
            began = time.perf_counter()
            ids = self.allowed(name, constraint, output)
            report.mask_s.append(time.perf_counter() - began)
            if self._end in ids:
                return str(self._backend.decode(output, skip_special_tokens=True))
            # Tokens that end strings and lists, more often than chance would take them.
            closing = [each for each in ids if set(self._backend.id_to_token(each)) & set('"]}')]
            output.append(draw.choice(closing if closing and draw.random() < 0.5 else ids))
        return None

    def accepts(self, name: str, constraint: Constraint, text: str) -> bool:
        """Return whether a whole text is allowed."""
        output = list[int]()
        for token in [*self._backend.encode(text, add_special_tokens=False).ids, self._end]:
            if token not in self.allowed(name, constraint, output):
                return False
            output.append(token)
        return True


def run(folder: Path, count: int) -> Report:
    report, walker = Report(), Walker()
    files = sorted(folder.glob("*.json"), key=lambda file: hashlib.sha256(file.name.encode()).digest())[:count]
    for file in files:
        examine(walker, file, report)
    return report


def examine(walker: Walker, file: Path, report: Report) -> None:
    """Compile the schema of one file, and check its instances and a random answer."""
    case: dict[str, Any] = json.loads(file.read_bytes())
    constraint = Constraint(ConstraintKind.JSON, json.dumps(case["schema"]))
    report.schemas += 1
    began = time.perf_counter()
    refused = walker.grammars.compile(constraint).exception()
    if refused is not None:
        report.refused[str(refused)[:40]] += 1
        return
    report.compile_s.append(time.perf_counter() - began)
    try:
        for number, instance in enumerate(case.get("tests", ())):
            text = json.dumps(instance["data"], separators=(",", ":"), ensure_ascii=False)
            kept = walker.accepts(f"{file.name} {number}", constraint, text)
            report.instances[f"{'valid' if instance['valid'] else 'invalid'}, {'' if kept else 'not '}allowed"] += 1
        answer = walker.answer(file.name, constraint, report)
    except GrammarError:
        report.too_complex += 1
        return
    if answer is not None:
        report.ended += 1
        if not _valid(answer, case["schema"]):
            report.invalid.append(file.name)


def _valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


def lines(report: Report) -> Iterator[str]:
    compiled = len(report.compile_s)
    yield f"{report.schemas} schemas, of which {compiled} ({compiled / report.schemas:.1%}) compile"
    yield f"reasons to refuse: {', '.join(f'{reason!r} {count}' for reason, count in report.refused.most_common(5))}"
    for name, values in (("compile", report.compile_s), ("next tokens", report.mask_s)):
        median, p99, most = (1e3 * float(np.quantile(values, share)) for share in (0.5, 0.99, 1.0))
        yield f"{name}: median {median:.2f} ms, P99 {p99:.1f} ms, longest {most:.0f} ms"
    yield f"{report.too_complex} become too complex"
    yield f"of {report.ended} random answers that ended, {len(report.invalid)} are not valid"
    yield f"instances: {', '.join(f'{kind} {count}' for kind, count in sorted(report.instances.items()))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="files with a schema and tests, as in JSONSchemaBench")
    parser.add_argument("--count", type=int, default=500, help="files, chosen by the hash of their names")
    given = parser.parse_args()
    report = run(given.folder, given.count)
    console = Console(width=120)
    for line in lines(report):
        console.print(line, highlight=False, markup=False)
    if report.invalid:
        raise SystemExit(f"not valid: {', '.join(report.invalid[:10])}")


if __name__ == "__main__":
    main()
