"""Role changes when the launcher cannot place all planned workers."""

import pytest

from twofold.errors import RequestError
from twofold.instance import Role
from twofold.serving.controller.replanning import DegradedMode
from twofold.serving.telemetry.snapshot import PoolMember

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


class Staff:
    """Service stub with the given workers and their roles."""

    def __init__(self, **roles):
        self.roles = {name.replace("_", "-"): role for name, role in roles.items()}
        # Workers in `stuck` cannot change role.
        self.retired, self.stuck = [], set()

    def pools(self):
        return [
            PoolMember(
                instance=name,
                role=role,
                home=role,
                state="retired" if name in self.retired else "up",
                circuit_breaker="closed",
                restarts=0,
                waiting=0,
                running=0,
                blocks_total=0,
                blocks_free=0,
            )
            for name, role in self.roles.items()
        ]

    def set_role(self, instance, role):
        if instance in self.stuck:
            raise RequestError("it is not up", status=404)
        self.roles[instance] = role

    def retire(self, instance):
        self.retired.append(instance)

    def unretire(self, instance, role):
        self.retired.remove(instance)
        self.roles[instance] = role


@pytest.fixture
def staff():
    return Staff(prefill_0=P, prefill_1=P, decode_0=D, decode_1=D)


def test_a_worker_takes_the_missing_role_and_returns(staff):
    degraded = DegradedMode(staff, roles_move=True)
    degraded.update(["decode-0", "decode-1"])
    assert staff.roles["prefill-0"] is P
    assert staff.roles["prefill-1"] is D
    assert "continuing with 1P+1D, prefill-1 changes to decode" in degraded.messages[-1]
    degraded.update([])
    assert staff.roles["prefill-1"] is P
    assert "prefill-1 changes back to prefill" in degraded.messages[-1]


def test_with_fixed_roles_a_worker_retires_for_the_missing_phase(staff):
    degraded = DegradedMode(staff, roles_move=False)
    degraded.update(["decode-0", "decode-1"])
    assert staff.retired == ["prefill-1"]
    degraded.update(["decode-1"])  # decode-0 takes the released room
    assert staff.retired == ["prefill-1"]
    degraded.update([])
    assert staff.retired == []


def test_no_worker_moves_when_the_plan_is_equally_near(staff):
    for moves in (True, False):
        for lost in ("prefill-0", "decode-1"):
            degraded = DegradedMode(staff, roles_move=moves)
            degraded.update([lost])
            assert (staff.retired, list(staff.roles.values())) == ([], [P, P, D, D])
            assert "continuing with" in degraded.messages[-1]


def test_one_worker_cannot_serve_two_phases(staff):
    degraded = DegradedMode(staff, roles_move=False)
    degraded.update(["prefill-0", "decode-0", "decode-1"])
    assert "too few" in degraded.messages[-1]
    assert staff.retired == []


def test_mixed_workers_keep_their_role():
    staff = Staff(mixed_0=M, mixed_1=M)
    degraded = DegradedMode(staff, roles_move=False)
    degraded.update(["mixed-0"])
    assert degraded.messages == ["no room for mixed-0: continuing with 1 of 2 workers"]


def test_a_worker_that_cannot_move_is_skipped(staff):
    staff.stuck.add("prefill-1")
    degraded = DegradedMode(staff, roles_move=True)
    degraded.update(["decode-0", "decode-1"])
    assert staff.roles["prefill-1"] is P
