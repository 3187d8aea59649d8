"""Length distributions of the named workloads match their source traces."""

import sys
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from support.traces import ROOT, public_trace
from twofold.workload.distributions import load_lengths
from twofold.workload.source import LENGTHS, is_named

PUBLISHED = {"azure-code": ((1469, 2048), (13, 28)), "azure-conv": ((1020, 1155), (129, 211))}


@pytest.mark.parametrize("name", PUBLISHED)
def test_generated_lengths_have_the_published_median_and_mean(name):
    lengths = load_lengths(name)
    for quantiles, (_, mean) in zip((lengths.prompt_tokens, lengths.output_tokens), PUBLISHED[name], strict=True):
        segments = pairwise(zip(lengths.probabilities, quantiles, strict=True))
        own = sum((right - left) * (low + high) / 2 for (left, low), (right, high) in segments)
        assert own == pytest.approx(mean, rel=0.01)
    for seed in (0, 1, 2):
        drawn = np.array(list(islice(load_lengths(name).sample(seed), 50_000)))
        for column, (median, mean) in zip(drawn.T, PUBLISHED[name], strict=True):
            assert np.median(column) == pytest.approx(median, rel=0.04, abs=1)
            assert column.mean() == pytest.approx(mean, rel=0.04)


@pytest.mark.parametrize("name", PUBLISHED)
def test_generated_lengths_stay_within_the_observed_range(name):
    lengths = load_lengths(name)
    drawn = np.array(list(islice(lengths.sample(0), 50_000)))
    assert drawn.min(axis=0).tolist() == [lengths.prompt_tokens[0], lengths.output_tokens[0]]
    assert (drawn.max(axis=0) <= [lengths.prompt_tokens[-1], lengths.output_tokens[-1]]).all()
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.02


@pytest.mark.parametrize("name", LENGTHS)
def test_data_names_its_source(name):
    """Every packaged distribution is valid and names its source, licence and paper."""
    lengths = load_lengths(name)
    assert lengths.name == name
    source, licence, paper = ("Azure LLM inference trace 2023", "CC-BY", "Splitwise")
    if name not in PUBLISHED:
        source, licence, paper = ("figure 7 of the paper; spread assumed", "none needed", "DistServe")
    assert source in lengths.source
    assert lengths.licence.startswith(licence)
    assert paper in lengths.citation
    assert (lengths.probabilities[0], lengths.probabilities[-1]) == (0.0, 1.0)
    for column in (lengths.probabilities, lengths.prompt_tokens, lengths.output_tokens):
        assert len(column) == len(lengths.probabilities)
        assert column == sorted(column)


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [("distserve-chat", 755.5, 200.3), ("distserve-code", 171.3, 98.2), ("distserve-summaries", 1738.3, 90.7)],
)
def test_distserve_lengths_have_the_means_of_the_paper(name, prompt, output):
    drawn = np.array(list(islice(load_lengths(name).sample(0), 50_000)))
    assert drawn.mean(axis=0).tolist() == pytest.approx([prompt, output], rel=0.03)
    assert drawn.max() <= 2048


def test_fixed_lengths_are_written_as_prompt_plus_output():
    """The name `512+64` gives fixed prompt and output lengths."""
    assert set(islice(load_lengths("512+64").sample(0), 100)) == {(512, 64)}
    assert not is_named("512+")
    assert not is_named("0+64")


@pytest.mark.parametrize("name", PUBLISHED)
def test_committed_quantiles_equal_the_derived_ones(name, monkeypatch):
    """The packaged quantiles equal the output of bench/derive_quantiles.py for the Azure traces."""
    trace = public_trace(f"azure-2023-{name.removeprefix('azure-')}.csv")
    monkeypatch.syspath_prepend(str(Path(ROOT) / "bench"))
    import derive_quantiles

    again, kept = derive_quantiles.derive(trace, name), load_lengths(name)
    assert (again.requests, again.requests_per_s) == (kept.requests, kept.requests_per_s)
    assert again.probabilities == kept.probabilities
    assert (again.prompt_tokens, again.output_tokens) == (kept.prompt_tokens, kept.output_tokens)
    sys.modules.pop("derive_quantiles")
