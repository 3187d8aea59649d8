"""The planning evaluator, which stores simulation results in a file and reuses them."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from support.analytic_cluster import SPLIT, AnalyticCluster, design
from support.inline_executor import InlineExecutor
from support.plans import stored_evaluations
from twofold.errors import ConfigurationError
from twofold.planning.design import Budget, frontier
from twofold.planning.evaluation import Trial
from twofold.planning.evaluator import EvaluationStore, Evaluator
from twofold.planning.rates import RateSearch
from twofold.planning.search import most_throughput

DESIGNS = frontier(SPLIT, Budget(machines=30).allows)


def name(trial):
    return f"{trial.design.name}@{trial.rate}"


def planned(store, executor):
    cluster = AnalyticCluster(slack=3.0)
    evaluator = Evaluator(executor, store, name)
    search = RateSearch(evaluate=evaluator, bound=cluster)
    return asyncio.run(most_throughput(search, DESIGNS)), evaluator


def test_evaluations_round_trip(tmp_path):
    path = tmp_path / "folder" / "plan.sqlite"
    evaluation = AnalyticCluster().judged(design(2, 3), 4.0)
    with EvaluationStore(path) as store:
        assert store.get("a") is None
        store.put("a", "2+3 at 4/s", evaluation)
        with EvaluationStore(path) as other:
            assert other.get("a") == evaluation
            assert stored_evaluations(path) == 1


def test_a_second_plan_simulates_nothing(tmp_path):
    with EvaluationStore(tmp_path / "plan.sqlite") as store:
        first, _ = planned(store, InlineExecutor())
        second, again = planned(store, InlineExecutor())
    assert first == second
    assert again.effort.simulations == 0
    assert again.effort.reused == len(again.answered())


@pytest.mark.parametrize("after", [1, 4, 11])
def test_resumes_an_interrupted_plan(tmp_path, after):
    with EvaluationStore(tmp_path / "plan.sqlite") as store:
        with pytest.raises(KeyboardInterrupt):
            planned(store, InlineExecutor(interrupt_after=after))
        kept = stored_evaluations(tmp_path / "plan.sqlite")
        assert after - 12 <= kept <= after  # simulations in progress are lost
        resumed, evaluator = planned(store, InlineExecutor())
    with EvaluationStore(Path(":memory:")) as nothing:
        whole, from_scratch = planned(nothing, InlineExecutor())
    assert resumed == whole
    assert evaluator.effort.reused == kept
    assert evaluator.effort.simulations == from_scratch.effort.simulations - kept


def test_equal_trials_run_once():
    executor = InlineExecutor()
    trial = Trial(design(2, 3), 4.0)

    async def both():
        return await asyncio.gather(evaluator(trial), evaluator(trial))

    with EvaluationStore(Path(":memory:")) as store:
        evaluator = Evaluator(executor, store, name)
        one, other = asyncio.run(both())
    assert one == other
    assert (executor.runs, evaluator.effort.simulations) == (1, 1)


def test_a_file_that_is_no_store_is_refused(tmp_path):
    text, later = tmp_path / "text", tmp_path / "later"
    text.write_text("not a database, though long enough to be looked at " * 20)
    sqlite3.connect(later).execute("PRAGMA user_version=99").connection.close()
    for path in (text, tmp_path, later):
        with pytest.raises(ConfigurationError, match=str(path)):
            EvaluationStore(path)


def test_a_broken_row_is_explained(tmp_path):
    with EvaluationStore(tmp_path / "plan.sqlite") as store:
        store.put("a", "a", AnalyticCluster().judged(design(1, 1), 1.0))
        store._database.execute("UPDATE evaluations SET evaluation = '{'")
        with pytest.raises(ConfigurationError, match="cannot be used"):
            store.get("a")


def test_a_database_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "mine.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="another program"):
        EvaluationStore(path)
    assert path.read_bytes() == before
