"""Several workers on one study, in real processes, on SQLite, a journal and PostgreSQL; killed, stopped, disk full."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from mupscale.data.stream import Batch
from mupscale.study import SweepJob, run_sweep
from mupscale.study.search import Worker
from mupscale.study.space import Space, Sweep, Tried
from mupscale.study.trials import Storage, SweepTrials, trial_state
from mupscale.system import Interrupted, MupscaleError, parse_record
from mupscale.train import Spec
from paper_runs import SPACE, quiet, sweep_job, two_seeds
from processes import DEADLINE, PROCESSES, Child
from slow_cases import with_slow
from small_runs import Rows, limit_files

optuna = pytest.importorskip("optuna")

STEPS = 40


class Held(Rows):
    """Data at which processes may be held in the middle."""

    meet: Any = None  # a barrier at which processes wait for each other, once, when each has begun to train

    def examples(self, rows: Tensor) -> Batch:
        """Some rows, when all are there."""
        if Held.meet is not None and len(rows) > 1:
            Held.meet.wait(DEADLINE)
            Held.meet = None
        return super().examples(rows)


def task(**changes: Any) -> SweepJob:
    return sweep_job(partial(two_seeds, data=Spec("test_workers.Held"), steps=STEPS), steps=STEPS, **changes)


class Process(Child):
    """A sweep in a process of its own."""

    def __init__(
        self,
        work: SweepJob,
        place: str,
        output: Path,
        start: Any = None,
        prepare: Callable[[], object] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(output, _act, work, place, start, prepare, options)

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def is_stopped(self) -> bool:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(self.process.pid)], capture_output=True, text=True)
        return state.stdout.strip().startswith("T")

    def result(self) -> Sweep:
        assert "error" not in self.words()
        return parse_record(Sweep, json.loads(self.said().splitlines()[-1]))


def _act(work: SweepJob, place: str, start: Any, prepare: Any, options: dict[str, Any]) -> None:
    if prepare is not None:
        prepare()
    if start is not None:
        start.wait(DEADLINE)
        Held.meet = start
    try:
        print(json.dumps(asdict(run_sweep(work, place, **options))), flush=True)
    except MupscaleError as error:
        print(f"error: {error}", flush=True)


def trials(place: str) -> list[Any]:
    """Every trial of optuna's."""
    return list(optuna.load_study(study_name="s", storage=Storage(place).optuna).get_trials())


def fates(place: str) -> list[str]:
    return [trial_state(trial) for trial in trials(place)]


def until(condition: Callable[[], bool], seconds: float = DEADLINE) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except KeyError:  # no study yet
            pass
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.05)


def held(work: SweepJob, place: str, output: Path, **options: Any) -> tuple[Process, Any]:
    """A worker that has begun to train, and waits in its first batch until we wait at its barrier, too."""
    barrier = PROCESSES.Barrier(2)
    worker = Process(work, place, output, barrier, **options)
    barrier.wait(DEADLINE)
    until(lambda: barrier.n_waiting == 1)
    return worker, barrier


def busy(place: str, count: int) -> Callable[[], bool]:
    """Whether so many trials are under way, their worker noted."""

    def look() -> bool:
        exists = place.startswith("postgresql") or Path(place.removeprefix("journal:")).exists()
        return exists and sum("worker" in t.user_attrs for t in trials(place) if trial_state(t) == "running") == count

    return look


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """What one worker finds."""
    return run_sweep(task(), str(tmp_path_factory.mktemp("alone") / "study.db"), note=quiet)


def assert_same(found: Sweep, alone: Sweep) -> None:
    assert [trial.cell for trial in found.trials] == SPACE.cells
    for one, other in zip(found.trials, alone.trials, strict=True):
        assert one.status == other.status == "finished"
        assert one.losses == pytest.approx(other.losses, rel=1e-9)
        assert one.cost == other.cost
        assert one.steps == other.steps


# ------------------------------------------------------------------------------------------------ a real PostgreSQL


class Server:
    """A PostgreSQL server of our own on a socket in its own folder; it refuses root, so another user runs it then."""

    def __init__(self, programs: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pg-"))
        self.user: dict[str, Any] = {}
        if os.geteuid() == 0:
            names = {entry.pw_name for entry in pwd.getpwall()}
            who = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
            os.chown(self.folder, who.pw_uid, who.pw_gid)
            self.user = {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []}
        self.programs, self.process = programs, None
        self._call("initdb", "-D", f"{self.folder}/data", "-U", "mupscale", "-A", "trust", "-N", "-E", "UTF8")
        self.url = f"postgresql://mupscale@/postgres?host={self.folder}"
        self.start()

    def _call(self, name: str, *args: str) -> None:
        done = subprocess.run(
            [self.programs / name, *args], cwd=self.folder, capture_output=True, text=True, **self.user
        )
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        self._call(
            "pg_ctl", "start", "-w", "-D", f"{self.folder}/data", "-l", f"{self.folder}/log",
            "-o", f"-k {self.folder} -c listen_addresses='' -F",
        )  # fmt: skip

    def stop(self) -> None:
        self._call("pg_ctl", "stop", "-w", "-m", "immediate", "-D", f"{self.folder}/data")


def postgres_programs() -> Path | None:
    """The folder with initdb and pg_ctl, which Debian keeps out of PATH."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "pg_ctl").exists()), None)


@pytest.fixture
def server() -> Iterator[Server]:
    programs = postgres_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server here")
    pytest.importorskip("psycopg")
    made = Server(programs)
    yield made
    with suppress(AssertionError):  # it may be stopped already
        made.stop()
    shutil.rmtree(made.folder, ignore_errors=True)


@pytest.fixture(params=with_slow(["sqlite", "journal", "postgresql"], ["sqlite"]))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A storage of each kind."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("server").url)
    return f"journal:{tmp_path}/study.log" if request.param == "journal" else f"{tmp_path}/study.db"


# ------------------------------------------------------------------------------------------------ together


def test_two_workers_share_a_study(place: str, alone: Sweep, tmp_path: Path) -> None:
    start = PROCESSES.Barrier(2)
    workers = [Process(task(), place, tmp_path / f"{i}.log", start, worker=bool(i), at_once=1) for i in range(2)]
    first, second = (worker.result() for worker in workers)
    assert_same(first, alone)
    assert_same(second, alone)
    done = [trial for trial in trials(place) if trial_state(trial) == "finished"]
    assert len(done) == len(SPACE.cells)  # each cell exactly once
    assert len({trial.user_attrs["worker"] for trial in done}) == 2
    assert "died" not in fates(place)


def test_no_trial_is_taken_twice(place: str, tmp_path: Path) -> None:
    space = Space(tuple(0.001 * (1 + number) for number in range(30)))
    start = PROCESSES.Barrier(3)
    takers = [PROCESSES.Process(target=_take_all, args=(place, space, tmp_path / f"{i}.json", start)) for i in range(3)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join(DEADLINE)
    taken = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(3)]
    cells = {number: tuple(trial.user_attrs["cell"]) for number, trial in enumerate(trials(place))}
    assert sorted(cells[number] for some in taken for number in some) == sorted(space.cells)


def _take_all(place: str, space: Space, output: Path, start: Any) -> None:
    study, taken = SweepTrials(task(space=space), Storage(place)), []
    start.wait(DEADLINE)
    while study.count_open():
        for number, cell in study.take(1, output.name).items():
            taken.append(number)
            study.finish(number, Tried(*cell, [1.0]), 0.0)
    output.write_text(json.dumps(taken))


def test_a_worker_killed_in_the_middle(place: str, alone: Sweep, tmp_path: Path) -> None:
    worker, _ = held(task(), place, tmp_path / "log")
    assert busy(place, len(SPACE.cells))()
    worker.signal(signal.SIGKILL)
    worker.wait()
    said: list[str] = []
    found = run_sweep(task(), place, note=said.append)
    assert_same(found, alone)
    after = trials(place)
    assert [trial_state(trial) for trial in after].count("died") == len(SPACE.cells)
    assert [t.user_attrs.get("retry_of") for t in after if trial_state(t) == "finished"] == list(
        range(len(SPACE.cells))
    )
    assert any("a worker died" in text for text in said)


def test_a_sweep_that_is_not_complete_says_so(tmp_path: Path) -> None:
    place, one = f"{tmp_path}/study.db", Space((0.1,))
    for attempt in range(2):
        worker, _ = held(task(space=one), place, tmp_path / f"{attempt}.log")
        assert len(trials(place)) == attempt + 1
        worker.signal(signal.SIGKILL)
        worker.wait()
    with pytest.raises(MupscaleError, match=r"s is not complete.*lr 0.1 and noise 0 \(its worker died twice\)"):
        run_sweep(task(space=one), place, retries=1, note=quiet)
    assert [trial.cell for trial in run_sweep(task(space=one), place, note=quiet).trials] == one.cells


@pytest.mark.slow
def test_a_trial_whose_worker_has_not_yet_said_who_it_is(place: str, alone: Sweep) -> None:
    """Taken, and cut before its worker was noted: others work on, and take it over when there is still no sign."""
    made = SweepTrials(task(), Storage(place))
    made.study.enqueue_trial(SPACE.cells[0]._asdict(), user_attrs={"cell": list(SPACE.cells[0])})
    made.study.ask(made.ranges)
    with Worker(made) as me:
        assert me.end_abandoned_trials() == 0
        assert me.count_others() == 0
    assert_same(run_sweep(task(), place, grace=1.0, note=quiet), alone)
    assert fates(place) == ["died", *["finished"] * len(SPACE.cells)]


def test_a_storage_that_is_gone_where_work_begins_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    made = SweepTrials(task(), Storage(f"journal:{tmp_path}/here/study.log", patience=0.3))
    shutil.rmtree(tmp_path / "here")
    with pytest.raises(MupscaleError, match=r"cannot be used: .*the same command goes on from there"), Worker(made):
        pass


def test_the_living_notice_a_death_and_take_over(alone: Sweep, tmp_path: Path) -> None:
    place = f"{tmp_path}/study.db"
    first, _ = held(task(), place, tmp_path / "first.log", at_once=3)
    assert busy(place, 3)()
    second = Process(task(), place, tmp_path / "second.log")
    until(lambda: "waiting for 3 trials" in second.said())
    first.signal(signal.SIGKILL)
    assert_same(second.result(), alone)


@pytest.mark.slow
def test_a_worker_that_comes_back_after_it_was_given_up(alone: Sweep, tmp_path: Path) -> None:
    place = f"{tmp_path}/study.db"
    slow, barrier = held(task(), place, tmp_path / "slow.log", grace=1.0)
    assert busy(place, len(SPACE.cells))()
    with closing(sqlite3.connect(place, timeout=DEADLINE)) as database:
        database.execute("BEGIN IMMEDIATE")  # nobody else has the lock now: stopped with it, it would keep it for ever
        slow.signal(signal.SIGSTOP)
        until(slow.is_stopped)
        database.rollback()
    try:
        assert_same(run_sweep(task(), place, grace=1.0, note=quiet), alone)
    finally:
        slow.signal(signal.SIGCONT)
    barrier.wait(DEADLINE)
    assert_same(slow.result(), alone)
    assert "6 of 6 trials had been given to another worker" in slow.said()
    assert fates(place).count("finished") == len(SPACE.cells)


# ------------------------------------------------------------------------------------------------ interrupted


@pytest.mark.quick("15")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_worker_goes_on_where_it_was(number: int, alone: Sweep, tmp_path: Path) -> None:
    place, folder = f"{tmp_path}/study.db", tmp_path / "run"
    worker, barrier = held(task(), place, tmp_path / "log", folder=folder)
    worker.signal(number)
    barrier.wait(DEADLINE)
    assert "error: interrupted after step" in worker.words()
    assert len(list(folder.glob("s.*.batch.json"))) == len(list(folder.glob("s.*.stack.safetensors"))) == 1
    assert fates(place) == ["running"] * len(SPACE.cells)
    said: list[str] = []
    assert_same(run_sweep(task(), place, folder=folder, note=said.append), alone)
    assert any("going on after step" in text for text in said)
    assert fates(place) == ["finished"] * len(SPACE.cells)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_sweep_interrupted_in_a_notebook_goes_on_in_it(alone: Sweep, tmp_path: Path) -> None:
    """The same process asks again: it is alive, but it is not at work any more."""
    place, said = f"{tmp_path}/study.db", list[str]()
    asked = False

    def interrupt(step: int, values: Mapping[int, float]) -> None:
        nonlocal asked
        if not asked and step > 1:
            asked = True
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run_sweep(task(), place, folder=tmp_path / "run", note=said.append, on_point=interrupt)
    assert_same(run_sweep(task(), place, folder=tmp_path / "run", note=said.append), alone)
    assert not any("waiting" in sentence for sentence in said)
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.slow
def test_an_interrupted_worker_without_a_folder_gives_its_trials_back(alone: Sweep, tmp_path: Path) -> None:
    place = f"{tmp_path}/study.db"
    worker, barrier = held(task(), place, tmp_path / "log")
    worker.signal(signal.SIGTERM)
    barrier.wait(DEADLINE)
    assert "error: interrupted" in worker.words()
    assert fates(place) == ["void"] * len(SPACE.cells)
    assert_same(run_sweep(task(), place, note=quiet), alone)
    assert not any("retry_of" in trial.user_attrs for trial in trials(place))


@pytest.mark.slow
def test_an_interrupted_worker_that_stays_away_is_replaced(alone: Sweep, tmp_path: Path) -> None:
    place, folder = f"{tmp_path}/study.db", tmp_path / "run"
    worker, barrier = held(task(), place, tmp_path / "log", folder=folder)
    worker.signal(signal.SIGINT)
    barrier.wait(DEADLINE)
    worker.wait()
    assert_same(run_sweep(task(), place, grace=1.0, note=quiet), alone)  # another machine: it does not see the folder
    assert fates(place).count("died") == 0
    assert_same(run_sweep(task(), place, folder=folder, note=quiet), alone)
    assert list(folder.iterdir()) == []


# ------------------------------------------------------------------------------------------------ full, and gone


@pytest.mark.parametrize("share", [0.2, 0.8])
@pytest.mark.parametrize(("prefix", "name"), [("journal:", "study.log"), ("", "study.db")], ids=["journal", "sqlite"])
@pytest.mark.slow
def test_a_full_disk(prefix: str, name: str, share: float, alone: Sweep, tmp_path: Path) -> None:
    run_sweep(task(), f"{prefix}{tmp_path}/{name}", note=quiet, at_once=1)
    whole = (tmp_path / name).stat().st_size
    folder = tmp_path / "full"
    folder.mkdir()
    place = f"{prefix}{folder}/{name}"
    empty = Storage(place)
    size = max((folder / name).stat().st_size, int(share * whole))
    del empty
    full = partial(limit_files, size, survive=True)
    worker = Process(task(), place, tmp_path / "log", prepare=full, at_once=1, patience=2.0)
    said = worker.words()
    assert "Traceback" not in said
    assert said.count("error: ") == 1
    assert f"storage {place} cannot be used: " in said
    kept = [] if not (folder / name).stat().st_size else _finished(place)
    assert_same(run_sweep(task(), place, note=quiet), alone)
    assert _finished(place)[: len(kept)] == kept  # what was told stays told


def _finished(place: str) -> list[tuple[int, float]]:
    try:
        return [(trial.number, trial.value) for trial in trials(place) if trial_state(trial) == "finished"]
    except KeyError:
        return []


@pytest.mark.slow
def test_a_server_that_goes_away_in_the_middle(server: Server, alone: Sweep, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    worker, barrier = held(task(), server.url, tmp_path / "log", folder=folder, patience=1.0)
    server.stop()
    barrier.wait(DEADLINE)
    said = worker.words()
    assert "Traceback" not in said
    assert "error: the study's storage postgresql://mupscale@/postgres" in said
    assert "the same command goes on from there" in said
    server.start()
    assert_same(run_sweep(task(), server.url, folder=folder, note=quiet), alone)
    assert fates(server.url) == ["finished"] * len(SPACE.cells)  # what was trained is told, not trained again


@pytest.mark.slow
def test_a_server_that_restarts_is_waited_for(server: Server, alone: Sweep, tmp_path: Path) -> None:
    worker, barrier = held(task(), server.url, tmp_path / "log", patience=DEADLINE)
    server.stop()
    barrier.wait(DEADLINE)
    time.sleep(2.0)
    server.start()
    assert_same(worker.result(), alone)
