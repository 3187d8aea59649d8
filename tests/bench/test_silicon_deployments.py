"""Deployments of InferenceX, as bench/silicon reads them from a clone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bench" / "silicon"
LISTED = """\
dsr1-fp4-gb200-dynamo-trt:
  framework: dynamo-trt
  model-prefix: dsr1
  runner: gb200
  precision: fp4
  seq-len-configs:
  - isl: 1024
    osl: 1024
    search-space:
    - {concurrencies}
      prefill: {{tp: 4, ep: 4, dp-attn: true}}
      decode: {{num-worker: 4, tp: 8, ep: 8, dp-attn: false, additional-settings: [{options}]}}
"""


@pytest.fixture(scope="module")
def silicon():
    sys.path.insert(0, str(FOLDER))
    try:
        import inferencex
        import rows
    finally:
        sys.path.remove(str(FOLDER))
    return inferencex, rows


@pytest.fixture
def clone(silicon, tmp_path):
    """Return two functions: the first commits a version of the file, the second reads all versions."""
    inferencex, _ = silicon
    file = tmp_path / inferencex.FILE
    file.parent.mkdir(parents=True)

    def git(*command, day="2026-01-10"):
        author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        env = os.environ | {"GIT_COMMITTER_DATE": f"{day}T12:00:00", "GIT_AUTHOR_DATE": f"{day}T12:00:00"}
        subprocess.run(["git", "-C", tmp_path, *author, *command], check=True, env=env, capture_output=True)

    def commit(day, concurrencies, options):
        file.write_text(LISTED.format(concurrencies=concurrencies, options=options))
        git("add", ".")
        git("commit", "-m", day, day=day)

    git("init")
    return commit, lambda: inferencex.Deployments(tmp_path)


def measured(silicon, **changes):
    _, rows = silicon
    fields = {
        "id": "a",
        "silicon_data_source": "db-dump; silicon_concurrency=24; measured=2026-02-01T00:00:00.000Z",
        "backend": "trtllm",
        "model_path": "deepseek-ai/DeepSeek-R1",
        "system": "gb200",
        "precision": "fp4",
        "mode": "disagg",
        "isl": 1024,
        "osl": 1024,
        "prefill_num_workers": 1,
        "prefill_attention_dp_size": 4,
        "prefill_moe_ep_size": 4,
        "decode_num_workers": 4,
        "decode_tp_size": 8,
        "decode_moe_ep_size": 8,
        "silicon_ttft_ms": 1.0,
        "silicon_tpot_ms": 1.0,
    }
    return rows.SiliconRow(**(fields | changes))


def test_options_are_those_of_the_day_of_the_measurement(silicon, clone):
    commit, deployments = clone
    commit("2026-01-10", "conc-list: [24]", "CONFIG_FILE=gen4_tep8_batch4_eplb0_mtp0.yaml")
    commit("2026-02-10", "conc-list: [24]", "CONFIG_FILE=gen4_tep8_batch16_eplb0_mtp0.yaml")
    assert deployments().setting(measured(silicon), faster=False).batch == 4


def test_a_deployment_may_be_listed_after_its_measurement(silicon, clone):
    commit, deployments = clone
    commit("2026-01-10", "conc-list: [8]", "DECODE_MAX_BATCH_SIZE=4")
    commit("2026-02-20", "conc-list: [24]", "DECODE_MAX_BATCH_SIZE=16")
    assert deployments().setting(measured(silicon), faster=False).batch == 16


def test_recipes_may_count_the_requests_of_one_worker(silicon, clone):
    commit, deployments = clone
    commit("2026-01-10", "conc-list: [6]", "DECODE_MAX_BATCH_SIZE=8")
    assert deployments().setting(measured(silicon), faster=False).batch == 8
    assert deployments().setting(measured(silicon, isl=8192), faster=False) == silicon[0].Setting()


def test_the_sample_may_lack_the_parallelism_of_the_attention(silicon, clone):
    commit, deployments = clone
    commit("2026-01-10", "conc-list: [24]", "x")
    row = measured(silicon, prefill_attention_dp_size=None, prefill_tp_size=4)
    prefill, decode = deployments().setting(row, faster=False).parts
    assert (prefill.attention_data, decode.attention_data) == (True, False)
    corrected = row.with_attention(row.roles[0], data=True)
    assert corrected.parallelism(row.roles[0]) == measured(silicon).parallelism(row.roles[0])


def test_a_faster_measurement_is_speculative_if_one_is_listed(silicon, clone):
    commit, deployments = clone
    speculative = 'spec-decoding: "mtp"\n      conc-list: [24]'
    commit("2026-01-10", speculative, "CONFIG_FILE=gen4_tep8_batch4_eplb0_mtp3.yaml")
    assert deployments().setting(measured(silicon), faster=True).draft_tokens == 3


def test_rejects_a_folder_that_is_no_clone(silicon, tmp_path):
    inferencex, _ = silicon
    with pytest.raises(inferencex.ConfigurationError, match="is not a clone"):
        inferencex.Deployments(tmp_path)


def test_numbers_of_workers_are_those_of_the_only_deployment(silicon, clone):
    commit, deployments = clone
    commit("2026-01-10", "conc-list: [24]", "x")
    unknown = {"prefill_num_workers": None, "decode_num_workers": None, "prefill_attention_dp_size": None}
    row = measured(silicon, **unknown, prefill_tp_size=4)
    assert not row.complete
    completed = deployments().completed(row)
    known = measured(silicon)
    assert [completed.parallelism(role) for role in row.roles] == [known.parallelism(role) for role in row.roles]
    assert [completed.ranks(role) for role in row.roles] == [4, 4]
    assert deployments().completed(measured(silicon, **unknown, prefill_tp_size=8)).complete is False
