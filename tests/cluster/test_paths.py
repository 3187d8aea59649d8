"""Transfer times between the instances of a simulated cluster."""

from twofold.cluster.file import parse_cluster
from twofold.cluster.paths import paths_of
from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec
from twofold.hardware.catalog import load_catalog

CATALOG = load_catalog()


def test_layer_wise_crossover_matches_the_paper():
    """For prompts above about 512 tokens, layer-wise hand-off beats serialized hand-off (Splitwise, section 6.2)."""
    pools = parse_cluster("1xh100:prefill,1xh100:decode", model="", catalog=CATALOG).pools
    spec = ClusterSpec(model="bloom-176b", router="jsq", pools=pools)
    paths = paths_of(spec, CATALOG.model("bloom-176b"), instance_profiles(spec, CATALOG))
    assert 400 < paths.crossover("prefill-0") < 600
    transfer = paths.transfer("prefill-0", "decode-0")
    crossover = paths.crossover("prefill-0")
    for tokens, by_layer in ((crossover - 1, False), (crossover, True)):
        layer_wise_s = transfer.layer_wise_s(tokens, paths.prefill_s("prefill-0", tokens))
        assert (layer_wise_s < transfer.serialized_s(tokens)) is by_layer
