"""Which families of designs a plan looks at, from what people write."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from twofold.errors import ConfigurationError
from twofold.planning.design import Family, MachineKind
from twofold.planning.problem import Problem

_T = TypeVar("_T")
# The designs of Splitwise (ISCA'24, section 6): prefill machine + decode machine.
SPLITWISE = {"aa": "a100+a100", "hh": "h100+h100", "ha": "h100+a100", "hhcap": "h100+h100-pcap"}
# How colocated instances batch: whole prompts beside decodes, or chunks of them, small or large.
COLOCATED = (("mixed", None), ("chunked-prefill", 512), ("chunked-prefill", 2048))


def parse_families(
    problem: Problem, families: Sequence[str], machines: str | None, *, split: bool, colocated: bool
) -> tuple[Family, ...]:
    """The families of `--family` (PREFILL+DECODE, or AA, HH, HA, HHcap), or of all pairs of `--machines`.

    With neither, the four of Splitwise. `colocated` adds, for each machine in them, one family per way to batch. Raises
    ConfigurationError for what cannot be understood.
    """
    if families and machines:
        raise ConfigurationError("give either --family or --machines, not both")
    if not (split or colocated):
        raise ConfigurationError("--no-split and --no-colocated together leave nothing to plan")
    if machines:
        kinds = _unique(problem.kind(name) for name in _words(machines))
        pairs = [(prefill, decode) for prefill in kinds for decode in kinds]
    else:
        words = [word for text in families for word in _words(text)] or list(SPLITWISE)
        pairs = _unique(_parse_pair(problem, word) for word in words)
    kinds = _unique(kind for pair in pairs for kind in pair)
    found = [Family(kinds=pair) for pair in pairs] if split else []
    if colocated:
        found += [
            Family(kinds=(kind,), batcher=batcher, max_num_batched_tokens=budget)
            for kind in kinds
            for batcher, budget in COLOCATED
        ]
    return tuple(found)


def fitting(problem: Problem, families: Iterable[Family]) -> tuple[tuple[Family, ...], tuple[str, ...]]:
    """(families whose machines all hold the model, why the other machines do not).

    Raises ConfigurationError where none is left.
    """
    reasons: dict[str, str] = {}
    fit = []
    for family in families:
        wrong = {kind.name: why for kind in family.kinds if (why := _why_not(problem, kind))}
        reasons |= wrong
        if not wrong:
            fit.append(family)
    if not fit:
        raise ConfigurationError(next(iter(reasons.values())))
    return tuple(fit), tuple(reasons.values())


def _parse_pair(problem: Problem, word: str) -> tuple[MachineKind, MachineKind]:
    known = word.lower().removeprefix("splitwise-")
    prefill, plus, decode = SPLITWISE.get(known, word).partition("+")
    if not plus:
        raise ConfigurationError(
            f"family {word!r} is not understood: write PREFILL+DECODE as in h100+a100, or AA, HH, HA or HHcap"
        )
    return problem.kind(prefill.strip()), problem.kind(decode.strip())


def _why_not(problem: Problem, kind: MachineKind) -> str | None:
    try:
        problem.kv_capacity_tokens(kind)
    except ConfigurationError as error:
        return str(error)
    return None


def _words(text: str) -> Iterator[str]:
    return (word.strip() for word in text.split(",") if word.strip())


def _unique(items: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(items))
