"""Layer-by-layer progress of a prefill that several ranks compute."""

from twofold.engine.rank_link import LayerProgress


def test_a_layer_waits_for_all_ranks_and_earlier_layers():
    """A layer is reported once all ranks have computed it and every earlier layer has been reported."""
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
