"""`twofold pools show` and `twofold pools set`, run on an emulated service."""

from functools import partial

import pytest

from twofold.bench.services import free_port, served

CLUSTER = """
model: llama2-70b
router: {router}
pools:
  - {{machines: 2, machine: dgx-h100, role: prefill}}
  - {{machines: 1, machine: dgx-h100, role: decode}}
"""


@pytest.fixture
def pools(twofold):
    """Return a function that runs `twofold pools`."""
    return partial(twofold, "pools")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Return the URL of an emulated service with two prefill workers and one decode worker."""
    file = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    file.write_text(CLUSTER.format(router="splitwise"))
    with served(None, ["--engine", "emulated", "--cluster", str(file)]) as url:
        yield url


def test_shows_every_worker_and_sets_a_role(service, pools):
    shown = pools("show", "--base-url", service)
    assert shown.code == 0
    assert [line.split()[:4] for line in shown.out.splitlines()[1:]] == [
        ["prefill-0", "prefill", "prefill", "up"],
        ["prefill-1", "prefill", "prefill", "up"],
        ["decode-0", "decode", "decode", "up"],
    ]
    changed = pools("set", "prefill-1", "mixed", "--base-url", service)
    assert changed.code == 0
    assert ["prefill-1", "mixed", "mixed", "up"] in [line.split()[:4] for line in changed.out.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(("set", "nobody", "decode"), "no worker 'nobody'"), (("set", "decode-0", "sideways"), "sideways")],
)
def test_mistakes_are_one_sentence(service, pools, arguments, sentence):
    """`twofold pools set` rejects an unknown worker or role with a one-line error that names the worker or role."""
    done = pools(*arguments, "--base-url", service)
    assert done.code == 2
    assert sentence in done.err
    assert len(done.err.splitlines()) == 1


def test_the_last_worker_of_a_phase_keeps_it(service, pools):
    """The role of the last decode worker can change only while a mixed worker can take over decode."""
    pools("set", "prefill-1", "prefill", "--base-url", service)
    refused = pools("set", "decode-0", "prefill", "--base-url", service)
    assert refused.code == 2
    assert "the last worker of its phase" in refused.err
    pools("set", "prefill-1", "mixed", "--base-url", service)
    assert pools("set", "decode-0", "prefill", "--base-url", service).code == 0
    pools("set", "decode-0", "decode", "--base-url", service)


def test_no_service_is_one_sentence(pools):
    done = pools("show", "--base-url", f"http://127.0.0.1:{free_port()}")
    assert done.code == 2
    assert "no service of Twofold answers" in done.err
