"""Measurement of the contention between the instances of a service."""

from itertools import accumulate

import msgspec
import pytest

from support.hosts import profile
from support.paced import PacedStepper
from twofold.characterize.contention import with_contention
from twofold.characterize.local import LocalTarget
from twofold.characterize.target import StreamTimes, TargetLimits
from twofold.instance import Role

ALONE = msgspec.structs.replace(profile(), host=None)
SPLIT = {Role.PREFILL: 1, Role.DECODE: 1}
TOKEN_S, GAP_S = 0.002, 0.05


class Pair:
    """Two instances that slow each other down: prefills by `prompts`, decodes by `decodes`.

    On colocated instances, a prompt delays the decode on its own instance.
    """

    engine = "pair"

    def __init__(self, prompts, decodes, max_model_len=4096, *, colocated=False):
        self.colocated = colocated
        self.slower = {"prompts": prompts, "decodes": decodes}
        self.limits = TargetLimits(max_model_len=max_model_len)

    def run(self, streams):
        decodes = [stream for stream in streams if stream.output_tokens > 1]
        if decodes and len(decodes) < len(streams):
            return self._split(streams)
        prompts, gap = (self.slower if len(streams) == 2 else {"prompts": 1.0, "decodes": 1.0}).values()
        return [self._times(stream, prompts, [gap] * (stream.output_tokens - 1)) for stream in streams]

    def close(self):
        pass

    def _split(self, streams):
        """Several requests decode, and one instance computes a prompt meanwhile."""
        *decodes, prompt = streams
        decode = decodes[0]
        began = self._times(decode, 1.0, [1.0] * prompt.after_tokens).token_times_s[prompt.after_tokens - 1]
        ttft_s = prompt.prompt_tokens * TOKEN_S * self.slower["prompts"]
        now, times = decode.prompt_tokens * TOKEN_S, []
        for _ in range(decode.output_tokens):
            times.append(now)
            now += GAP_S * (self.slower["decodes"] if began <= now < began + ttft_s else 1.0)
        found = [StreamTimes(0.0, times)] * len(decodes)
        if self.colocated:
            early = [now for now in times if now <= began + GAP_S]
            late = [began + ttft_s + GAP_S * number for number in range(len(times) - len(early))]
            found[0] = StreamTimes(0.0, early + late)
        return [*found, StreamTimes(began, [began + ttft_s])]

    def _times(self, stream, slower, gaps):
        first_s = stream.prompt_tokens * TOKEN_S * slower
        return StreamTimes(0.0, list(accumulate((GAP_S * gap for gap in gaps), initial=first_s)))


@pytest.mark.parametrize("roles", [{Role.MIXED: 2}, SPLIT])
def test_both_phases_are_measured(roles):
    pair = Pair(prompts=1.2, decodes=1.4, colocated=Role.MIXED in roles)
    found = with_contention(ALONE, pair, roles).shared_host
    assert found.cores == 2
    assert (found.prefill.crowded, found.decode.crowded) == pytest.approx((1.2, 1.4), rel=0.02)


def test_instances_do_not_speed_each_other_up():
    found = with_contention(ALONE, Pair(prompts=0.9, decodes=0.8), {Role.MIXED: 2}).shared_host
    assert (found.prefill.crowded, found.decode.crowded) == (1.0, 1.0)


def test_a_short_context_limits_the_prompts():
    found = with_contention(ALONE, Pair(prompts=1.2, decodes=1.4, max_model_len=512), SPLIT)
    assert found.shared_host.prefill.crowded == pytest.approx(1.2)


def test_an_instance_alone_has_no_contention():
    assert with_contention(ALONE, LocalTarget(PacedStepper()), {Role.MIXED: 1}) is ALONE


def test_a_profile_with_a_host_keeps_it():
    shared = profile()
    assert shared.host is not None
    assert with_contention(shared, Pair(prompts=1.2, decodes=1.4), SPLIT) is shared
