"""Which tensor and pipeline degrees an instance can have."""

from collections.abc import Iterator

from twofold.errors import ConfigurationError
from twofold.planning.design import MachineKind
from twofold.planning.problem import Problem


def instances_of(
    problem: Problem, machine: str, most_accelerators: int, most_stages: int | None = None
) -> list[MachineKind]:
    """Every instance that `machine` can host: smallest first.

    A tensor degree divides the model's heads and stays within the machine; a pipeline degree divides its layers. What
    does not hold the model, or what the performance model knows nothing of, is left out. Raises ConfigurationError with
    the reason of the largest where none is left.
    """
    found: list[MachineKind] = []
    reason: ConfigurationError | None = None
    for tensor, pipeline in _degrees(problem, machine, most_accelerators, most_stages):
        kind = problem.instance(machine, tensor, pipeline)
        try:
            problem.kv_capacity_tokens(kind)
            problem.performance(kind)
        except ConfigurationError as error:
            reason = error
        else:
            found.append(kind)
    if not found:
        raise reason or ConfigurationError(f"no instance on {machine} has {most_accelerators} accelerators")
    return found


def _degrees(problem: Problem, machine: str, most: int, most_stages: int | None) -> Iterator[tuple[int, int]]:
    model, whole = problem.catalog.model(problem.template.model), problem.catalog.machine(machine)
    tensors = [degree for degree in range(1, whole.count + 1) if model.heads % degree == 0]
    deepest = most if most_stages is None else min(most, most_stages)
    pipelines = [degree for degree in range(1, deepest + 1) if model.layers % degree == 0]
    pairs = [(tensor, stages) for tensor in tensors for stages in pipelines if tensor * stages <= most]
    yield from sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1]))
