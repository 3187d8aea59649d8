"""A model split by tensor or pipeline parallelism gives the same output as on one rank."""

import json
import os
import random
import subprocess
import sys
from itertools import chain

import pytest

from twofold.engine.torch.split_model import check_split_model
from twofold.errors import ConfigurationError
from twofold.kvcache.sharding import Sharding

SPLITS = {
    "llama": ["2x1", "1x2", "2x2", "1x3"],  # grouped-query attention
    "opt": ["2x1", "4x1", "1x2"],  # multi-head attention; transformers has no plan for it
    "gemma2": ["2x1", "1x2"],  # windows, softcaps, embeddings that are scaled
    "qwen3": ["2x1"],  # heads that are normalized
    "mixtral": ["2x1"],  # experts
}


def prompts():
    draw = random.Random(3)
    return [[draw.randrange(3, 512) for _ in range(length)] for length in (1, 17, 64, 300)]


@pytest.fixture(scope="module")
def outputs(tiny_model_dir, tmp_path_factory):
    """Return the outputs of each architecture, with and without sharding."""
    files = str(tmp_path_factory.mktemp("split"))
    models = [(str(tiny_model_dir(arch)), ",".join(["1x1", *SPLITS[arch]])) for arch in SPLITS]
    done = subprocess.run(
        [sys.executable, "-m", "support.split_engine", files, *chain(*models)],
        input=json.dumps(prompts()),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(SPLITS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.covers(engine="torch", model=SPLITS, feature="tp")
@pytest.mark.covers(engine="torch", model=("llama", "opt", "gemma2"), feature="pp")
@pytest.mark.parametrize("arch", SPLITS)
def test_sharded_models_equal_the_whole_model(arch, outputs):
    whole, *divided = outputs[arch]
    for split, (said, layers, first) in zip(SPLITS[arch], divided, strict=True):
        for one, other in zip(whole[0], said, strict=True):
            assert [token for token, _ in other] == [token for token, _ in one], split
            assert [p for _, p in other] == pytest.approx([p for _, p in one], abs=2e-4), split
        assert layers == whole[1], f"{split} announces every layer once and in order"
        assert first == whole[2] == [output[0][0] for output in whole[0]], f"{split} with chunks on all stages"


@pytest.mark.refuses(engine="torch", model=("gpt2", "deepseek_v3"), feature="tp")
@pytest.mark.refuses(engine="torch", model="gpt2", feature="pp")
@pytest.mark.parametrize(
    ("arch", "split", "why"),
    [
        ("llama", Sharding(4, 1), "2 key-value heads, which 4 tensor ranks"),
        ("llama", Sharding(1, 4), "3 layers, too few for the 4 pipeline stages"),
        ("gpt2", Sharding(2, 1), "tensor parallelism .* no plan that divides the heads of gpt2"),
        ("deepseek_v3", Sharding(2, 1), "no plan that divides the heads of deepseek_v3"),  # its plan is for experts
        ("gpt2", Sharding(1, 2), "pipeline parallelism .* no plan for gpt2"),
    ],
)
def test_refuses_models_that_cannot_be_sharded(arch, split, why, loaded):
    with pytest.raises(ConfigurationError, match=why):
        check_split_model(loaded(arch), split, arch)
