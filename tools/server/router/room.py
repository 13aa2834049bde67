"""Decides where a model is loaded, and which models make room for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vkbackend.models.arguments import HOST
from vkbackend.tools.server.router.places import Place
from vkbackend.tools.server.router.tenant import Tenant


@dataclass(frozen=True, slots=True)
class Room:
    """The models that hold memory at time `now`. `most` limits their number (0: no limit), and `budgets` are
    bytes by device."""

    most: int
    turn_s: float
    budgets: Mapping[str, int]
    open_ones: Sequence[Tenant]
    now: float

    def free_place(self, tenant: Tenant, reserved: set[str], n_ahead: int) -> Place | None:
        """Return the free place that is fastest if all models on a device compute at once, or None. Older
        requests wait for `n_ahead` models and for the devices `reserved`."""
        if self.most and len(self.open_ones) + n_ahead >= self.most:
            return None
        used = held_by(self.open_ones)
        free = [
            place
            for place in tenant.places or ()
            if not reserved & (place.keys - {HOST})
            and all(used[key] + nbytes <= self.budgets[key] for key, nbytes in place.held.items())
        ]
        return max(free, key=self._share_of_speed, default=None)

    def _share_of_speed(self, place: Place) -> float:
        devices = place.keys - {HOST}
        others = [other for other in self.open_ones if other.place and other.place.keys & devices]
        return place.speed / (1 + len(others))

    def victims(self, tenant: Tenant) -> list[Tenant]:
        """Return the least recently used models to close so that one of the places becomes free. The list is
        empty if models that are already closing suffice, or if no model may be closed yet."""
        tried = [(self._victims_at(tenant, place), place) for place in tenant.places or ()]
        ways = [(victims, place) for victims, place in tried if victims is not None]

        def cost(way: tuple[list[Tenant], Place]) -> tuple[float, float]:
            return max((victim.last_used for victim in way[0]), default=-1.0), -way[1].speed

        return min(ways, key=cost)[0] if ways else []

    def _victims_at(self, tenant: Tenant, place: Place) -> list[Tenant] | None:
        """Return the models to close for a place, or None if closing models does not suffice."""
        leaving = [other for other in self.open_ones if other.is_closing]
        used = held_by(self.open_ones) - held_by(leaving)
        short = Counter({key: used[key] + n - self.budgets[key] for key, n in place.held.items()})
        n_over = len(self.open_ones) - len(leaving) + 1 - (self.most or len(self.open_ones) + 1)
        victims = []
        for other in self._candidates(tenant):
            if n_over <= 0 and not any(n > 0 for n in short.values()):
                break
            frees = other.place.held if other.place else {}
            if n_over > 0 or any(short[key] > 0 and frees[key] > 0 for key in frees):
                victims.append(other)
                n_over -= 1
                short -= Counter(frees)
        return victims if n_over <= 0 and not any(n > 0 for n in short.values()) else None

    def _candidates(self, tenant: Tenant) -> list[Tenant]:
        """Return the models that may be closed. These are idle models, and models that have admitted requests
        for at least one turn. A model with requests then admits no more requests."""
        order = sorted(
            (other for other in self.open_ones if other.is_idle), key=lambda other: other.last_used
        )
        if self.now - tenant.since >= self.turn_s:
            busy = [other for other in self.open_ones if other.admits and other.n_active]
            served = [other for other in busy if self.now - other.loaded_at >= self.turn_s]
            order += sorted(served, key=lambda other: other.loaded_at)
        return order


def held_by(tenants: Iterable[Tenant]) -> Counter[str]:
    return sum((Counter(tenant.place.held) for tenant in tenants if tenant.place), Counter())
