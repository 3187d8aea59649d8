"""Keys of stored evaluations, which differ if and only if an input of the simulation differs."""

import msgspec
import pytest

from twofold.planning.design import Design, Family
from twofold.planning.evaluation import Trial
from twofold.planning.evaluator import Keys


def trial(problem, counts=(2, 3), rate=5.0, machine="h100"):
    return Trial(Design(family=Family(kinds=(problem.kind(machine),) * 2), counts=counts), rate)


def key(problem, **more):
    return Keys(problem).of(trial(problem, **more))


def replaced(problem, name, **changes):
    return msgspec.structs.replace(problem, **{name: msgspec.structs.replace(getattr(problem, name), **changes)})


def test_equal_problems_have_equal_keys(make_problem):
    assert key(make_problem()) == key(make_problem())


@pytest.mark.parametrize(
    "change",
    [
        {"slo": "splitwise"},
        {"slo": "ttft=2,tpot=0.2"},
        {"router": "jsq"},
        {"workload": "azure-code"},
        {"seed": 1},
        {"duration_s": 11.0},
        {"length_scale": 2.0},
        {"model": "llama2-70b"},
    ],
)
def test_each_part_of_the_problem_counts(make_problem, change):
    assert key(make_problem(**change)) != key(make_problem())


def test_the_contents_of_a_trace_count_and_not_its_path(make_problem, tmp_path):
    row = '{"id": "0", "arrival_s": 0.0, "prompt_tokens": 9, "output_tokens": 9}\n'
    paths = [tmp_path / name for name in ("one.jsonl", "two.jsonl", "other.jsonl")]
    for path, text in zip(paths, (row, row, row.replace("9", "8")), strict=True):
        path.write_text(text)
    one, two, other = (key(make_problem(workload=str(path))) for path in paths)
    assert one == two != other


def test_the_trial_counts(make_problem):
    """A change of machine counts, rate or machine type changes the key of a stored evaluation."""
    problem = make_problem()
    keys = [key(problem), key(problem, counts=(3, 2)), key(problem, rate=6.0), key(problem, machine="a100")]
    assert len(set(keys)) == 4


def test_catalog_figures_change_the_key(make_problem):
    problem = make_problem()
    catalog = problem.catalog
    faster = msgspec.structs.replace(catalog.machines["dgx-h100"], network_bytes_per_s=1.0)
    changed = replaced(problem, "catalog", machines=catalog.machines | {"dgx-h100": faster})
    assert key(changed) != key(problem)
    assert key(changed, machine="a100") == key(problem, machine="a100")


def test_an_attainment_counts(make_problem):
    """A change of the required SLO attainment changes the key of a stored evaluation."""
    problem = make_problem()
    assert key(msgspec.structs.replace(problem, attainment=0.99)) != key(problem)
