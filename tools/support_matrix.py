"""The support matrix of the site: which tests cover which model, engine, transport and feature.

A test names what it covers by the pytest markers `covers` and `refuses`:

    @pytest.mark.covers(engine="vllm", model=("gemma3_text", "gpt_oss"), feature="handoff")

Values are names, tuples of names, or constants of the test's module. The tests are parsed, not imported.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from twofold.engine.registry import ENGINES
from twofold.transport.registry import TRANSPORTS

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("covers", "refuses")
ENGINE_NAMES = {"torch": "built-in engine", "vllm": "vLLM", "emulated": "emulated engine"}
# Types of transformers.
MODELS = {
    "llama": "Llama",
    "qwen3": "Qwen3",
    "gpt2": "GPT-2",
    "opt": "OPT",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "mixtral": "Mixtral",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "DeepSeek-V3 (latent attention)",
    "nemotron_h": "Nemotron-H (state-space layers)",
}
OF_MODELS = {
    "tokens": "tokens of the reference",
    "handoff": "hand-off",
    "prefix": "prefix reuse",
    "replay": "replay after a loss",
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
}
FEATURES = OF_MODELS | {
    "layer-wise": "layer-wise hand-off",
    "serialized": "serialized hand-off",
    "pull": "pulled hand-off",
    "checksums": "checksums of transferred KV",
    "colocated": "colocated workers",
    "chunked-prefill": "chunked prefill",
    "pipeline-chunks": "chunks of a prompt on several pipeline stages",
    "experts": "experts divided among tensor ranks",
    "disconnects": "disconnected clients free every block",
    "preemption": "preemption or swapping for lack of KV memory",
    "store": "KV store of a host: memory and disk",
    "remote-store": "prefixes from the store of another host",
    "hosts": "workers on another host",
    "ray": "workers on a Ray cluster",
    "roles": "workers that change roles",
    "sampling": "seeded sampling, the same split and colocated",
    "penalties": "penalties and biases",
    "logprobs": "log probabilities",
    "structured": "structured output",
    "tools": "tool calls",
    "half": "half precision",
    "windows": "sliding windows",
    "latent": "latent attention",
    "states": "state-space layers",
    "fp8": "KV cache in FP8",
    "speculation": "speculative decoding",
    "async": "asynchronous scheduling",
    "lora": "LoRA adapters",
    "overload": "overload control",
    "journal": "replay of a journal to the same decisions",
    "blocks": "exact block transfers between processes",
}
_WORDS = {"covers": "✓", "refuses": "refused"}
_NOTHING = "not tested"
_ABOUT = (
    "This page is generated from markers of the tests. A number leads to a test that covers the combination, or that "
    "shows its refusal. *Not tested* does not mean that it fails. The reference is `generate` of transformers "
    "for the built-in engine, and one vLLM engine for `vllm`, both in "
    "float32. Models have random weights and few layers."
)
_OTHER_MODELS = (
    "Other decoder-only models of transformers run on the built-in engine if they use its attention interface; it "
    "refuses the rest when it loads them. The emulated engine computes no tokens, so it takes any model of the catalog."
)


class MarkerError(ValueError):
    """A marker with an unknown name, or with values that are not constants."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One combination that a test covers or refuses. A field is None where the marker does not give it."""

    kind: str
    test: str  # path::name
    engine: str | None
    model: str | None
    transport: str | None
    feature: str


def collect(folder: Path = ROOT / "tests") -> list[Mark]:
    """Return the marks of all tests below a folder. Raises MarkerError."""
    return [mark for path in sorted(folder.rglob("test_*.py")) for mark in marks_of(path)]


def marks_of(path: Path) -> Iterator[Mark]:
    """Yield the marks of the tests in a file. Raises MarkerError."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for test in ast.walk(tree):
        if not isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for each in test.decorator_list:
            if isinstance(each, ast.Call) and ast.unparse(each.func) in {f"pytest.mark.{kind}" for kind in KINDS}:
                kind = ast.unparse(each.func).rpartition(".")[2]
                yield from _marks(kind, each, f"{_shown_path(path)}::{test.name}", constants)


def _shown_path(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name)


def _marks(kind: str, call: ast.Call, test: str, constants: dict[str, ast.expr]) -> Iterator[Mark]:
    known: dict[str, list[str]] = {
        "engine": [*ENGINES],
        "model": [*MODELS],
        "transport": [*TRANSPORTS],
        "feature": [*FEATURES],
    }
    given: dict[str, Sequence[str | None]] = dict.fromkeys(known, (None,))
    for keyword in call.keywords:
        name = str(keyword.arg)
        if name not in known:
            raise MarkerError(f"{test}: {kind} has no argument {name}: choose from {', '.join(known)}")
        given[name] = _names(keyword.value, constants, test)
        if unknown := [value for value in given[name] if value not in known[name]]:
            raise MarkerError(f"{test}: unknown {name} {unknown[0]!r}: choose from {', '.join(known[name])}")
    if call.args or given["feature"] == (None,):
        raise MarkerError(f"{test}: give {kind} keyword arguments, among them a feature")
    for engine, model, transport, feature in product(*given.values()):
        yield Mark(kind, test, engine, model, transport, str(feature))


def _names(value: ast.expr, constants: dict[str, ast.expr], test: str) -> tuple[str, ...]:
    if isinstance(value, ast.Name) and value.id in constants:
        value = constants[value.id]
    if isinstance(value, ast.Dict):
        value = ast.Tuple([key for key in value.keys if key is not None])
    try:
        found = ast.literal_eval(value)
    except ValueError as error:
        raise MarkerError(f"{test}: {ast.unparse(value)} is neither a name nor a constant with names") from error
    return (found,) if isinstance(found, str) else tuple(found)


class Page:
    """The page in Markdown; `tests` numbers the tests that its cells lead to."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._marks = marks
        tests = sorted({mark.test for mark in marks})
        self.tests = {test: number for number, test in enumerate(tests, 1)}

    def text(self) -> str:
        """Return the whole page."""
        text = ["# Support matrix", _ABOUT]
        for engine in ("torch", "vllm"):
            text += [f"## Models: {ENGINE_NAMES[engine]}", self._models(engine)]
        return "\n\n".join([*text, _OTHER_MODELS, *self._features(), *self._transports(), *self._listed()])

    def _models(self, engine: str) -> str:
        rows = (
            [MODELS[it], *(self._cell(engine=engine, model=it, feature=each) for each in OF_MODELS)] for it in MODELS
        )
        return _table(["", *OF_MODELS.values()], rows)

    def _features(self) -> list[str]:
        rows = [[name, *(self._of_engine(each, it) for it in ENGINE_NAMES)] for each, name in FEATURES.items()]
        with_engines = [row for row in rows if set(row[1:]) != {_NOTHING}]
        gateway = [[name, self._of_engine(each, None)] for each, name in FEATURES.items()]
        alone = [row for row in gateway if row[1] != _NOTHING]
        return [
            "## Features by engine",
            _table(["", *ENGINE_NAMES.values()], with_engines),
            "## Features without an engine",
            _table(["", "tests of the gateway, or of transports"], alone),
        ]

    def _of_engine(self, feature: str, engine: str | None) -> str:
        found = [it for it in self._marks if (it.feature, it.engine) == (feature, engine)]
        general = [it for it in found if it.kind == "covers" or it.model is it.transport is None]
        return self._shown(general)

    def _transports(self) -> list[str]:
        columns = {
            "blocks between processes": {"feature": "blocks"},
            "hand-off, built-in": {"engine": "torch", "feature": "handoff"},
            "hand-off, vLLM": {"engine": "vllm", "feature": "handoff"},
            "another host, built-in": {"engine": "torch", "feature": "hosts"},
            "tensor parallel, vLLM": {"engine": "vllm", "feature": "tp"},
        }
        rows = ([f"`{it}`", *(self._cell(transport=it, **column) for column in columns.values())] for it in TRANSPORTS)
        return ["## Transports", _table(["", *columns], rows)]

    def _listed(self) -> list[str]:
        lines = (f'<span id="test-{number}">{number}</span> `{test}`' for test, number in self.tests.items())
        return ["## Tests", "  \n".join(lines)]

    def _cell(self, **wanted: str) -> str:
        return self._shown(it for it in self._marks if all(getattr(it, name) == each for name, each in wanted.items()))

    def _shown(self, marks: Iterable[Mark]) -> str:
        numbers: dict[str, set[int]] = {}
        for mark in marks:
            numbers.setdefault(_WORDS[mark.kind], set()).add(self.tests[mark.test])
        shown = (f"{word} " + " ".join(f"[{it}](#test-{it})" for it in sorted(of)) for word, of in numbers.items())
        return ", ".join(shown) or _NOTHING


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
