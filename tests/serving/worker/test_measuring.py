"""Measurement of prefill and link speed, on a fake clock."""

import pytest

from twofold.engine.base import KvLayout, LayerShape
from twofold.serving.worker.peers import SMALL_PROBE_BYTES, link_speed
from twofold.serving.worker.process import prefill_speed

LAYOUT = KvLayout(layers=(LayerShape(2, 8, 8),), block_size=16, dtype="float32", itemsize=4)


class Timed:
    """Fake engine or link whose calls take a fixed time plus a time per token or byte."""

    layout, num_blocks = LAYOUT, 64

    def __init__(self, fixed_s=0.0, per_unit_s=0.0, first_s=0.0):
        self.fixed_s, self.per_unit_s, self.first_s = fixed_s, per_unit_s, first_s
        self.now, self.sizes = 0.0, []

    def clock(self):
        return self.now

    def run(self, steps, on_layer=None):
        (step,) = steps
        assert len(step.block_table) <= self.num_blocks
        assert step.sampling is None
        self._work(len(step.token_ids))
        return [None]

    def probe(self, nbytes):
        self._work(nbytes)

    def _work(self, units):
        self.now += self.fixed_s + units * self.per_unit_s + (0 if self.sizes else self.first_s)
        self.sizes.append(units)


@pytest.mark.parametrize("per_token_s", [0.0, 1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("most", [1, 2, 100, 2048])
def test_prefill_speed_has_a_fixed_part_and_a_part_per_token(per_token_s, most):
    """A slow first run does not change the measured prefill speed."""
    engine = Timed(0.002, per_token_s, first_s=3.0)
    speed = prefill_speed(engine, most, engine.clock)
    assert max(engine.sizes) <= most
    assert speed.seconds(max(engine.sizes)) == pytest.approx(0.002 + max(engine.sizes) * per_token_s)
    if most > 2 and per_token_s < 0.1:
        assert speed.s_per_token == pytest.approx(per_token_s, abs=1e-12)


@pytest.mark.parametrize("per_byte_s", [1e-10, 1e-8, 1e-6])
def test_link_speed_has_overhead_and_bandwidth(per_byte_s):
    """Link overhead and bandwidth are measured within seconds, even on a slow link."""
    link = Timed(0.0005, per_byte_s, first_s=1.0)
    speed = link_speed(link, link.clock)
    assert 0.0005 * 0.99 < speed.overhead_s < (0.0005 + SMALL_PROBE_BYTES * per_byte_s) * 1.01
    assert speed.bytes_per_s == pytest.approx(1 / per_byte_s, rel=0.25)
    assert link.now < 1.0 + 8
