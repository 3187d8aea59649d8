"""Descriptions of registry entries."""

import importlib.util
import sys

from twofold.registry import summaries, summary
from twofold.scheduling.batchers import BATCHERS


def test_every_batcher_has_a_one_line_summary():
    for name, line in summaries(BATCHERS).items():
        assert line.endswith("."), name
        assert len(line) <= 120, name


def test_reads_the_source_of_classes_without_a_docstring(tmp_path):
    """Compiled classes have no docstring."""
    source = tmp_path / "policy.py"
    source.write_text('class Policy:\n    """Picks a policy."""\n')
    spec = importlib.util.spec_from_file_location("policy", source)
    sys.modules["policy"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Policy.__doc__ = None
    assert summary(module.Policy) == "Picks a policy."
    del sys.modules["policy"]
