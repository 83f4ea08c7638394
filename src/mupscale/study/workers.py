"""Which workers train a study's trials, and which of them died: each leaves a sign of life in the storage.

Optuna's own heartbeats (and RetryHeartbeatStaleTrialCallback) are for databases alone, and are one of every trial; a
journal has none, and a worker trains hundreds of trials as one program, of which one sign is enough.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from mupscale.study.trials import SweepTrials
from mupscale.system import is_process_alive, machine_name, parse_record

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


class Worker:
    """This worker: sends signs of life in the background, and watches those of others.

    Clocks of machines differ, so a worker is dead when its sign has not changed for the grace period by our clock; on
    the same machine a process that is gone is dead at once.
    """

    def __init__(self, trials: SweepTrials, grace: float = GRACE) -> None:
        self.trials, self.grace = trials, grace
        self.id = f"{platform.node() or 'worker'}-{os.getpid()}-{secrets.token_hex(3)}"
        self.state = "works"
        self._seen: dict[str, tuple[Heartbeat | None, float]] = {}  # with the time by our clock when it was new
        self._beats = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_in_touch, name="sweep-heartbeat", daemon=True)

    def __enter__(self) -> Worker:
        self.trials.storage.use(self.send_heartbeat)
        self.read_heartbeats()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        if self.state == "works":
            self.state = "left"
        with suppress(Exception):  # a storage that is gone cannot be told
            self.send_heartbeat()

    def _keep_in_touch(self) -> None:
        while not self._stopped.wait(min(5.0, self.grace / 6)):
            with suppress(Exception):  # the main thread meets the same trouble, and says so
                self.send_heartbeat()

    def send_heartbeat(self) -> None:
        """Leave a sign of life in the storage."""
        self._beats += 1
        state = self.state if self._stopped.is_set() else "works"  # whoever still sends, works
        sign = Heartbeat(self._beats, time.time(), machine_name(), os.getpid(), state)
        self.trials.storage.optuna.set_study_user_attr(self.trials.id, _PREFIX + self.id, asdict(sign))

    def read_heartbeats(self) -> None:
        """Read which workers have left a new sign of life."""
        storage = self.trials.storage
        for name, values in storage.use(lambda: storage.optuna.get_study_user_attrs(self.trials.id)).items():
            if name.startswith(_PREFIX):
                who = name.removeprefix(_PREFIX)
                sign = parse_record(Heartbeat, values, f"the sign of the worker {who} in the study")
                if who not in self._seen or self._seen[who][0] != sign:
                    self._seen[who] = sign, time.monotonic()

    def is_working(self, who: str) -> bool:
        """Whether a worker's last sign says that it works; true of one without a sign."""
        sign, _ = self._last_seen(who)
        return sign is None or sign.state == "works"

    def count_others(self) -> int:
        """How many other workers are alive, as far as their signs tell."""
        return sum(
            sign is not None and sign.state == "works" and not self._is_dead(who)
            for who, (sign, _) in self._seen.items()
            if who != self.id
        )

    def end_abandoned_trials(self) -> int:
        """End the trials of workers that died, and of those that were interrupted and did not come back."""
        self.read_heartbeats()
        self.trials.refresh()
        count = 0
        for number in sorted(self.trials.running):
            # one that died before it could sign is known by the trial alone
            who = self.trials.known[number].user_attrs.get("worker", f"trial {number}")
            if who != self.id and self._is_dead(who):
                sign, _ = self._last_seen(who)
                is_paused = sign is not None and sign.state == "paused"
                count += self.trials.drop(number, **({"void": "given back"} if is_paused else {}))
        return count

    def _last_seen(self, who: str) -> tuple[Heartbeat | None, float]:
        return self._seen.setdefault(who, (None, time.monotonic()))

    def _is_dead(self, who: str) -> bool:
        sign, since = self._last_seen(who)
        if sign is not None and sign.state == "left":
            return True
        if sign is not None and sign.state == "works" and sign.place == machine_name():
            return not is_process_alive(sign.pid) or time.monotonic() - since > self.grace
        return time.monotonic() - since > self.grace
