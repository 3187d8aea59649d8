"""What becomes of the plan while the launcher has no room for some of its workers.

all have room ── some wait ──▶ a smaller plan for those left ── more, or fewer, wait ──▶ another
      ▲                                         │
      └──────── the plan as it was ◀── none waits
"""

import logging
from collections.abc import Collection, Mapping
from typing import Protocol

from twofold.errors import RequestError
from twofold.instance import Role
from twofold.scheduling.split import Split
from twofold.scheduling.what_is_left import smaller
from twofold.serving.service import PoolMember

log = logging.getLogger(__name__)

_SAID = 10  # changes that are told to who asks; all are in the log


class Staff(Protocol):
    """The workers of a service, and what a shortage does to them."""

    def pools(self) -> list[PoolMember]: ...

    def set_role(self, instance: str, role: Role) -> None: ...

    def retire(self, instance: str) -> None: ...

    def want(self, instance: str, role: Role) -> None: ...


class Shortage:
    """Keeps both phases going with the workers that are left, and brings the plan back when there is room.

    Where `roles_move`, a worker takes the role that is missing. Else one of the other phase retires, and so gives its
    room to one that waits. Workers that do both phases need neither.
    """

    def __init__(self, staff: Staff, *, roles_move: bool) -> None:
        self._staff, self._roles_move = staff, roles_move
        self._plan: dict[str, Role] = {}  # as it was when the shortage began; empty while there is none
        self._given_up: list[str] = []  # retired, so that others have room
        self._said: list[str] = []

    @property
    def said(self) -> list[str]:
        """A sentence for each of the latest changes, the last one last."""
        return self._said[-_SAID:]

    def waiting(self, names: Collection[str]) -> None:
        """For these workers there is no room now, and there is for all others."""
        roles = {each.instance: each.home for each in self._staff.pools() if each.state != "retired"}
        if not names:
            self._say(f"all workers have room: {_listed(self._restore(roles)) or 'the plan is whole again'}")
            return
        self._plan = self._plan or roles
        left = {name: role for name, role in roles.items() if name not in names}
        what = f"no room for {_listed(sorted(names))}"
        if Role.MIXED in self._plan.values():
            self._say(f"{what}: {len(left)} of {len(self._plan)} workers go on")
            return
        running = _split(left)
        target = smaller(_split(self._plan), len(left), running)
        if target is None:
            self._say(f"{what}: too few workers are left for two phases")
            return
        steps = self._make(target, running, left, names)
        self._say(f"{what}: {target} for what is left" + (f", {_listed(steps)}" if steps else ""))

    def _make(
        self, target: Split, running: Split, left: dict[str, Role], waiting: Collection[str]
    ) -> list[str]:
        """The steps to a smaller plan, taken: those that were planned last go first."""
        many, few = Role.PREFILL, Role.DECODE
        if running.prefill < target.prefill:
            many, few = few, many
        surplus = abs(running.prefill - target.prefill)
        able = [name for name in reversed(left) if left[name] is many]
        if self._roles_move:
            return [f"{name} goes to {few.value}" for name in able[:surplus] if self._moved(name, few)]
        helped = sum(self._plan.get(name) is few for name in waiting)
        for name in able[: min(surplus, helped)]:
            self._staff.retire(name)
            self._given_up.append(name)
        return [f"{name} retires" for name in able[: min(surplus, helped)]]

    def _restore(self, roles: Mapping[str, Role]) -> list[str]:
        """The steps back to the plan, taken."""
        plan, self._plan = self._plan, {}
        moved = [(name, plan[name]) for name, role in roles.items() if plan.get(name, role) is not role]
        steps = [f"{name} goes back to {role.value}" for name, role in moved if self._moved(name, role)]
        for name in self._given_up:
            self._staff.want(name, plan[name])
        steps += [f"{name} is started again" for name in self._given_up]
        self._given_up.clear()
        return steps

    def _moved(self, name: str, role: Role) -> bool:
        try:
            self._staff.set_role(name, role)
        except RequestError as error:
            log.warning("%s stays as it is: %s", name, error)
            return False
        return True

    def _say(self, sentence: str) -> None:
        log.warning("%s", sentence)
        self._said.append(sentence)


def _split(roles: Mapping[str, Role]) -> Split:
    homes = list(roles.values())
    return Split(homes.count(Role.PREFILL), homes.count(Role.DECODE))


def _listed(words: Collection[str]) -> str:
    return ", ".join(words)
