"""What becomes of the plan when there is no room for some of the workers, and when there is again."""

import pytest

from twofold.errors import RequestError
from twofold.instance import Role
from twofold.serving.controller.replanning import DegradedMode
from twofold.serving.controller.service import PoolMember

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


class Staff:
    """Workers by name; `stuck` ones cannot change their role."""

    def __init__(self, **roles):
        self.roles = {name.replace("_", "-"): role for name, role in roles.items()}
        self.retired, self.stuck = [], set()

    def pools(self):
        return [
            PoolMember(
                instance=name,
                role=role,
                home=role,
                state="retired" if name in self.retired else "up",
                trusted="closed",
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

    def want(self, instance, role):
        self.retired.remove(instance)
        self.roles[instance] = role


@pytest.fixture
def staff():
    return Staff(prefill_0=P, prefill_1=P, decode_0=D, decode_1=D)


def test_a_worker_takes_the_role_that_is_missing(staff):
    """And goes home when there is room for all."""
    shortage = DegradedMode(staff, roles_move=True)
    shortage.waiting(["decode-0", "decode-1"])
    assert staff.roles["prefill-0"] is P
    assert staff.roles["prefill-1"] is D
    assert "1P+1D for what is left, prefill-1 goes to decode" in shortage.said[-1]
    shortage.waiting([])
    assert staff.roles["prefill-1"] is P
    assert "prefill-1 goes back to prefill" in shortage.said[-1]


def test_with_fixed_roles_one_gives_its_room_to_the_phase_that_has_nobody(staff):
    """It is started again when nobody waits any more."""
    shortage = DegradedMode(staff, roles_move=False)
    shortage.waiting(["decode-0", "decode-1"])
    assert staff.retired == ["prefill-1"]
    shortage.waiting(["decode-1"])  # the room that it gave up is taken
    assert staff.retired == ["prefill-1"]
    shortage.waiting([])
    assert staff.retired == []


def test_who_is_left_stays_where_that_is_as_near_to_the_plan(staff):
    """Of three workers two do one phase, whichever."""
    for moves in (True, False):
        for lost in ("prefill-0", "decode-1"):
            shortage = DegradedMode(staff, roles_move=moves)
            shortage.waiting([lost])
            assert (staff.retired, list(staff.roles.values())) == ([], [P, P, D, D])
            assert "for what is left" in shortage.said[-1]


def test_one_worker_is_too_few_for_two_phases(staff):
    """Which is said."""
    shortage = DegradedMode(staff, roles_move=False)
    shortage.waiting(["prefill-0", "decode-0", "decode-1"])
    assert "too few" in shortage.said[-1]
    assert staff.retired == []


def test_workers_that_do_both_phases_just_go_on():
    """There is nothing to make up for."""
    staff = Staff(mixed_0=M, mixed_1=M)
    shortage = DegradedMode(staff, roles_move=False)
    shortage.waiting(["mixed-0"])
    assert shortage.said == ["no room for mixed-0: 1 of 2 workers go on"]


def test_who_cannot_be_moved_is_left_alone(staff):
    """It may have been lost just now."""
    staff.stuck.add("prefill-1")
    shortage = DegradedMode(staff, roles_move=True)
    shortage.waiting(["decode-0", "decode-1"])
    assert staff.roles["prefill-1"] is P
