"""Which workers train a study's trials, and which of them died: each leaves a sign of life in the storage."""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from mupscale.sweep.study import Study
from mupscale.system import is_process_alive, machine_name, parse_record

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

GRACE = 60.0  # seconds without a sign of life after which a worker counts as dead
_PREFIX = "worker/"


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life, as the storage keeps it. state: works, paused or left."""

    beat: int
    time: float
    place: str
    pid: int
    state: str


@dataclass
class LastSeen:
    """Another worker's last sign of life, and when, by our own clock, it was a new one; None where none was found."""

    sign: Heartbeat | None
    since: float = field(default_factory=time.monotonic)


class Worker:
    """This worker: sends signs of life in the background, and watches those of others.

    Clocks of machines differ, so a worker is dead when its sign has not changed for the grace period by our clock; on
    the same machine a process that is gone is dead at once.
    """

    def __init__(self, study: Study, grace: float = GRACE) -> None:
        self.study, self.grace = study, grace
        self.id = f"{platform.node() or 'worker'}-{os.getpid()}-{secrets.token_hex(3)}"
        self.seen: dict[str, LastSeen] = {}
        self.state = "works"
        self._beats = 0
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._send_heartbeats, name="sweep-heartbeat", daemon=True)

    def __enter__(self) -> Worker:
        for call in (self.send_heartbeat, self.read_heartbeats):
            self.study.storage.use(call)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()
        with suppress(Exception):  # a storage that is gone cannot be told
            self.send_heartbeat("paused" if self.state == "paused" else "left")

    def _send_heartbeats(self) -> None:
        while not self._stopped.wait(min(5.0, self.grace / 6)):
            with suppress(Exception):  # the main thread meets the same trouble, and says so
                self.send_heartbeat()
                self.read_heartbeats()

    def send_heartbeat(self, state: str = "works") -> None:
        """Leave a sign of life in the storage."""
        self._beats += 1
        sign = Heartbeat(self._beats, time.time(), machine_name(), os.getpid(), state)
        self.study.storage.optuna.set_study_user_attr(self.study.id, _PREFIX + self.id, asdict(sign))

    def read_heartbeats(self) -> None:
        """Read which workers have left a new sign of life."""
        attributes = self.study.storage.optuna.get_study_user_attrs(self.study.id)
        with self._lock:
            for name, values in attributes.items():
                if not name.startswith(_PREFIX):
                    continue
                who = name.removeprefix(_PREFIX)
                sign = parse_record(Heartbeat, values, f"the sign of the worker {who} in the study")
                if who not in self.seen or self.seen[who].sign != sign:
                    self.seen[who] = LastSeen(sign)

    def is_working(self, who: str) -> bool:
        """Whether a worker's last sign says that it works; true of one without a sign."""
        with self._lock:
            last_seen = self.seen.get(who)
        return last_seen is None or last_seen.sign is None or last_seen.sign.state == "works"

    def count_others(self) -> int:
        """How many other workers are alive, as far as their signs tell."""
        with self._lock:
            seen = [last_seen for who, last_seen in self.seen.items() if who != self.id]
        return sum(s.sign is not None and s.sign.state == "works" and not self._is_dead(s) for s in seen)

    def end_abandoned_trials(self) -> int:
        """End the trials of workers that died, and of those that were interrupted and did not come back."""
        self.study.storage.use(self.read_heartbeats)
        self.study.refresh()
        attempts, count = self.study.attempts, 0
        for number in attempts.numbers("running"):
            trial = attempts.trials[number]
            if trial.user_attrs.get("worker") == self.id:
                continue
            last = self._last_seen(trial)
            if not self._is_dead(last):
                continue
            paused = last.sign is not None and last.sign.state == "paused"
            ended = self.study.make_void(trial.number, "given back") if paused else self.study.mark_dead(trial.number)
            count += ended
        return count

    def _last_seen(self, trial: FrozenTrial) -> LastSeen:
        """The last sign of a trial's worker; one that died before it could sign is known by the trial alone."""
        who = trial.user_attrs.get("worker", f"trial {trial.number}")
        with self._lock:
            return self.seen.setdefault(who, LastSeen(None))

    def _is_dead(self, last: LastSeen) -> bool:
        sign = last.sign
        if sign is not None and (sign.state == "left" or _has_vanished(sign)):
            return True
        return time.monotonic() - last.since > self.grace


def _has_vanished(sign: Heartbeat) -> bool:
    """Whether a worker of this machine says that it works, and its process is gone."""
    return sign.state == "works" and sign.place == machine_name() and not is_process_alive(sign.pid)
