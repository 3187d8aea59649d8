"""A prefill that loads KV which is there already, and stores what it computes, layer by layer.

Mooncake (arXiv 2407.00079) section 5.2: before the attention of layer l its load is waited for and that of layer l + 1
begins; after it the store of layer l begins. Loads, computation and stores are three lanes which each take one layer
after the other, so a prefill takes about as long as the slowest of them alone, and a layer of each other one.
"""


def layer_wise(layers: int, *lanes: float) -> float:
    """The time from the beginning of the first lane to the end of the last, in the unit of `lanes`.

    Each lane is the time that it takes for all layers if it never waits; layers are equal. A lane begins with a layer
    when it is through with the layer before, and the lane before it with this one:

        Σ lanes / layers + (layers − 1) · max(lanes) / layers

    A lane that has nothing to do takes no time and is best left out.
    """
    return (sum(lanes) + (layers - 1) * max(lanes)) / layers
