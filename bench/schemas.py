"""Compile the JSON schemas of a public collection, and check random answers that they allow.

    git clone https://github.com/guidance-ai/jsonschemabench
    python bench/schemas.py jsonschemabench/maskbench/data --count 500

Each file has a schema, and instances that are valid or not. For each schema, the script measures the time to compile
it, checks whether valid instances are allowed and invalid ones are not, and follows a random answer: at each step, one
of the allowed tokens. Every answer that ends is validated by the package jsonschema. The tokenizer is made on the spot.

With --engine vllm, in an environment with vLLM, vLLM's own choice compiles the same schemas: xgrammar, or llguidance
for what xgrammar does not support.

Exits with 1 if an answer that ended is not valid.
"""

import argparse
import hashlib
import json
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import msgspec
import numpy as np
from rich.console import Console

from twofold.engine.grammar import GrammarError, GrammarMatchers, allowed_tokens
from twofold.engine.model_factory import train_tokenizer
from twofold.reporting.output import json_text
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
    by_backend: Counter[str] = msgspec.field(default_factory=Counter)  # schemas, of vLLM


class Grammars(Protocol):
    """Compiles constraints and follows outputs, as `GrammarMatchers`."""

    def compile(self, constraint: Constraint) -> "Future[Any]": ...

    def allowed(self, request_id: str, constraint: Constraint, output: Sequence[int]) -> bytes: ...


class VllmGrammars:
    """The grammars of vLLM 0.32 with the backend `auto`, for one request at a time."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401  (of transformers)
        import llguidance.hf  # noqa: PLC0415  (only in vLLM's environment)
        import xgrammar  # type: ignore[import-not-found]  # noqa: PLC0415

        self._size = len(tokenizer)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._size)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=8, cache_enabled=True)
        self._vocabulary = llguidance.hf.from_tokenizer(tokenizer, self._size)
        self._compiled: dict[Constraint, Any] = {}
        self._followed, self._consumed = "", 0
        self._matcher: _Xgrammar | _Guidance | None = None
        self.by_backend: Counter[str] = Counter()

    def compile(self, constraint: Constraint) -> "Future[Any]":
        compiled = Future[Any]()
        try:
            self._compiled[constraint] = self._compile(constraint.text)
        except Exception as error:  # noqa: BLE001  (the libraries raise bare ones)
            compiled.set_exception(GrammarError(" ".join(str(error).split())))
        else:
            compiled.set_result(None)
        return compiled

    def _compile(self, schema: str) -> Any:  # noqa: ANN401
        import llguidance  # noqa: PLC0415
        from vllm.v1.structured_output.backend_guidance import serialize_guidance_grammar  # noqa: PLC0415
        from vllm.v1.structured_output.backend_types import StructuredOutputOptions  # noqa: PLC0415
        from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features  # noqa: PLC0415

        if not has_xgrammar_unsupported_json_features(json.loads(schema)):
            self.by_backend["xgrammar"] += 1
            return self._compiler.compile_json_schema(schema, any_whitespace=True)
        self.by_backend["llguidance"] += 1
        grammar = serialize_guidance_grammar(StructuredOutputOptions.JSON, schema)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher

    def allowed(self, request_id: str, constraint: Constraint, output: Sequence[int]) -> bytes:
        if request_id != self._followed:
            self._followed, self._consumed = request_id, 0
            self._matcher = self._new_matcher(self._compiled[constraint])
        assert self._matcher is not None  # noqa: S101  (the first call has another id)
        for token_id in output[self._consumed :]:
            self._matcher.accept(token_id)
        self._consumed = len(output)
        return self._matcher.allowed()

    def _new_matcher(self, compiled: Any) -> "_Xgrammar | _Guidance":  # noqa: ANN401
        return _Guidance(compiled) if hasattr(compiled, "deep_copy") else _Xgrammar(compiled, self._size)


class _Xgrammar:
    def __init__(self, compiled: Any, size: int) -> None:  # noqa: ANN401
        import xgrammar  # noqa: PLC0415

        self._matcher, self._mask = xgrammar.GrammarMatcher(compiled), xgrammar.allocate_token_bitmask(1, size)

    def accept(self, token_id: int) -> None:
        if not self._matcher.is_terminated():
            self._matcher.accept_token(token_id)

    def allowed(self) -> bytes:
        if self._matcher.is_terminated():
            return bytes(4 * self._mask.shape[1])
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        return bytes(self._mask.numpy().tobytes())


class _Guidance:
    def __init__(self, compiled: Any) -> None:  # noqa: ANN401
        self._matcher = compiled.deep_copy()

    def accept(self, token_id: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)

    def allowed(self) -> bytes:
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(self._matcher.get_error())
        return mask


class Walker:
    """Follows answers with a small tokenizer."""

    def __init__(self, engine: str) -> None:
        tokenizer = train_tokenizer(VOCABULARY, CONTEXT, corpus_characters=CORPUS)
        self._backend = tokenizer.backend_tokenizer
        self._size, self._end = self._backend.get_vocab_size(), int(tokenizer.eos_token_id)
        self.grammars: Grammars = (
            VllmGrammars(tokenizer)
            if engine == "vllm"
            else GrammarMatchers(self._backend.to_str, self._size, [self._end])
        )

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


def run(folder: Path, count: int, engine: str) -> Report:
    report, walker = Report(), Walker(engine)
    files = sorted(folder.glob("*.json"), key=lambda file: hashlib.sha256(file.name.encode()).digest())[:count]
    for file in files:
        examine(walker, file, report)
    if isinstance(walker.grammars, VllmGrammars):
        report.by_backend = walker.grammars.by_backend
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
    if report.by_backend:
        yield f"backends: {', '.join(f'{name} {count}' for name, count in report.by_backend.most_common())}"
    yield f"memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at most"
    yield f"instances: {', '.join(f'{kind} {count}' for kind, count in sorted(report.instances.items()))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="files with a schema and tests, as in JSONSchemaBench")
    parser.add_argument("--count", type=int, default=500, help="files, chosen by the hash of their names")
    parser.add_argument("--engine", choices=("twofold", "vllm"), default="twofold", help="whose grammars")
    parser.add_argument("--json", type=Path, help="file for all results")
    given = parser.parse_args()
    report = run(given.folder, given.count, given.engine)
    console = Console(width=120)
    for line in lines(report):
        console.print(line, highlight=False, markup=False)
    if given.json is not None:
        given.json.write_text(json_text(report), "utf-8")
    if report.invalid:
        raise SystemExit(f"not valid: {', '.join(report.invalid[:10])}")


if __name__ == "__main__":
    main()
