"""Who works on a study, and who has died at it: every worker leaves a sign of life in the storage."""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mupscale.sweep.study import Study, fate

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

GRACE = 60.0  # seconds without a sign of life after which a worker counts as dead
_PREFIX = "worker/"


@dataclass
class Sighting:
    """Another worker's last sign of life, and when, by our own clock, it was a new one; None where none was found."""

    sign: dict[str, Any] | None
    since: float = field(default_factory=time.monotonic)


class Worker:
    """This worker: signs of life in the background, and an eye on those of others.

    Clocks of machines differ, so a worker is dead when its sign has not changed for the grace period by our clock; on
    the same machine a process that is gone is dead at once.
    """

    def __init__(self, study: Study, grace: float = GRACE) -> None:
        self.study, self.grace = study, grace
        self.id = f"{platform.node() or 'worker'}-{os.getpid()}-{secrets.token_hex(3)}"
        self.seen: dict[str, Sighting] = {}
        self.state = "works"
        self._beats = 0
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._live, name="sweep-heartbeat", daemon=True)

    def __enter__(self) -> Worker:
        for call in (self.sign, self.look):
            self.study.storage.use(call)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        with suppress(Exception):  # a storage that is gone cannot be told
            self.sign("paused" if self.state == "paused" else "left")

    def _live(self) -> None:
        while not self._over.wait(min(5.0, self.grace / 6)):
            with suppress(Exception):  # the main thread meets the same trouble, and says so
                self.sign()
                self.look()

    def sign(self, state: str = "works") -> None:
        """A sign of life."""
        self._beats += 1
        sign = {"beat": self._beats, "time": time.time(), "place": here(), "pid": os.getpid(), "state": state}
        self.study.storage.optuna.set_study_user_attr(self.study.id, _PREFIX + self.id, sign)

    def look(self) -> None:
        """Note who has given a new sign of life."""
        attributes = self.study.storage.optuna.get_study_user_attrs(self.study.id)
        with self._lock:
            for name, sign in attributes.items():
                who = name.removeprefix(_PREFIX)
                if name.startswith(_PREFIX) and (who not in self.seen or self.seen[who].sign != sign):
                    self.seen[who] = Sighting(sign)

    def at_work(self, who: str) -> bool:
        """Whether a worker's last sign says that it works; one that nobody has seen may."""
        with self._lock:
            sighting = self.seen.get(who)
        return sighting is None or sighting.sign is None or sighting.sign["state"] == "works"

    def others(self) -> int:
        """How many other workers are alive; a trial whose worker is not noted yet has no sign, and is none."""
        with self._lock:
            seen = [sighting for who, sighting in self.seen.items() if who != self.id]
        return sum(s.sign is not None and s.sign["state"] == "works" and not self._dead(s) for s in seen)

    def bury(self) -> int:
        """End the trials of workers that died, and of those that were interrupted and did not come back."""
        self.study.storage.use(self.look)
        found = 0
        for trial in self.study.all():
            if fate(trial) != "running" or trial.user_attrs.get("worker") == self.id:
                continue
            last = self._last(trial)
            if not self._dead(last):
                continue
            paused = last.sign is not None and last.sign["state"] == "paused"
            end = self.study.make_void(trial.number, "given back") if paused else self.study.fail(trial.number)
            found += end
        return found

    def _last(self, trial: FrozenTrial) -> Sighting:
        """The last sign of a trial's worker; one that died before it could sign is known by the trial alone."""
        who = trial.user_attrs.get("worker", f"trial {trial.number}")
        with self._lock:
            return self.seen.setdefault(who, Sighting(None))

    def _dead(self, last: Sighting) -> bool:
        sign = last.sign
        if sign is not None and sign["state"] == "left":
            return True
        if sign is not None and sign["state"] == "works" and sign["place"] == here() and not is_alive(sign["pid"]):
            return True
        return time.monotonic() - last.since > self.grace


def is_alive(pid: int) -> bool:
    """Whether a process of this machine still runs; yes where one cannot ask without ending it (Windows)."""
    if os.name == "nt":
        return True
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:1]
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return state != ["Z"]  # dead, but its parent has not looked yet


def here() -> str:
    """This machine, as far as process numbers mean the same."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{platform.node()} {space}".strip()
