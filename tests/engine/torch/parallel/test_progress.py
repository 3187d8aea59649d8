"""Layers that several ranks compute are announced when all have."""

from twofold.engine.torch.ranks import LayerProgress


def test_a_layer_waits_for_its_last_rank_and_for_those_below_it():
    """Ranks are not heard in order."""
    said = []
    progress = LayerProgress(3, 2, said.append)
    progress.computed(0)
    progress.computed(1)
    progress.computed(1)
    assert said == []
    progress.computed(0)
    assert said == [0, 1]
    progress.computed(2)
    assert said == [0, 1]
    progress.finish()
    assert said == [0, 1, 2]
    progress.computed(2)
    assert said == [0, 1, 2], "what is heard later changes nothing"
