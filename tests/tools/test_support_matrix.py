"""The support matrix has the markers of the tests, and nothing else."""

import importlib.util
import re

import pytest

from support.traces import ROOT

SPEC = importlib.util.spec_from_file_location("support_matrix", ROOT / "tools" / "support_matrix.py")
support_matrix = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(support_matrix)

TESTS = """
import pytest

MODELS = ("llama", "opt")
WINDOWS = {"gemma2": 128}


@pytest.mark.covers(engine="vllm", model=MODELS, feature=("handoff", "tp"))
def test_one(): ...


@pytest.mark.refuses(engine="torch", model=WINDOWS, feature="pp")
class TestOther: ...
"""


def marks_of(folder, text):
    path = folder / "test_some.py"
    path.write_text(text)
    return list(support_matrix.marks_of(path))


@pytest.fixture(scope="module")
def marks():
    """Return the marks of all tests. Each names known engines, models, transports and features, or this fails."""
    return support_matrix.collect()


def row(text, title, name):
    """Return the cells of a row in the section `title` of the page."""
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    (line,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", section, re.MULTILINE)
    return line.split(" | ")


def test_a_mark_has_every_combination_of_its_values(tmp_path):
    found = marks_of(tmp_path, TESTS)
    assert {(it.kind, it.engine, it.model, it.feature) for it in found} == {
        *(("covers", "vllm", model, feature) for model in ("llama", "opt") for feature in ("handoff", "tp")),
        ("refuses", "torch", "gemma2", "pp"),
    }
    assert {it.test for it in found} == {"test_some.py::test_one", "test_some.py::TestOther"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ('engine="tensorrt", feature="tp"', "unknown engine 'tensorrt': choose from torch"),
        ('model="lama", feature="tp"', "unknown model 'lama'"),
        ('transport="pigeon", feature="tp"', "unknown transport 'pigeon'"),
        ('feature="teleport"', "unknown feature 'teleport'"),
        ('device="cuda", feature="tp"', "no argument device"),
        ('engine="vllm"', "among them a feature"),
        ('"vllm"', "keyword arguments"),
        ("feature=names()", "neither a name nor a constant"),
    ],
)
def test_wrong_markers_are_errors(arguments, says, tmp_path):
    with pytest.raises(support_matrix.MarkerError, match=says):
        marks_of(tmp_path, f"@pytest.mark.covers({arguments})\ndef test_one(): ...\n")


def test_cells_are_those_of_the_markers(tmp_path):
    page = support_matrix.Page(marks_of(tmp_path, TESTS))
    text = page.text()
    numbers = page.tests
    assert row(text, "Models: vLLM", "Llama") == [
        "not tested",
        f"✓ [{numbers['test_some.py::test_one']}](#test-{numbers['test_some.py::test_one']})",
        "not tested",
        "not tested",
        f"✓ [{numbers['test_some.py::test_one']}](#test-{numbers['test_some.py::test_one']})",
        "not tested",
    ]
    assert row(text, "Models: built-in engine", "Gemma 2")[-1].startswith("refused [")
    assert set(row(text, "Models: built-in engine", "Llama")) == {"not tested"}


def test_every_engine_transport_and_model_is_covered(marks):
    covered = [mark for mark in marks if mark.kind == "covers"]
    assert {it.engine for it in covered} >= set(support_matrix.ENGINES)
    assert {it.transport for it in covered} >= set(support_matrix.TRANSPORTS)
    assert {it.model for it in covered} >= set(support_matrix.MODELS)
    assert {it.feature for it in covered} >= set(support_matrix.FEATURES)


def test_marked_tests_exist_and_have_a_line_each(marks):
    text = support_matrix.Page(marks).text()
    listed = re.findall(r'<span id="test-(\d+)">\1</span> `([^`]+)::(\w+)`', text)
    assert len(listed) == len({mark.test for mark in marks})
    assert {number for number, _, _ in listed} == set(re.findall(r"\(#test-(\d+)\)", text))
    for _, path, name in listed:
        assert re.search(rf"^(async )?(def|class) {name}\b", (ROOT / path).read_text(), re.MULTILINE)
