"""The study of a sweep: which trials count, what is stopped early, and one sentence for whatever is wrong."""

from __future__ import annotations

import math
import random
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mupscale.engine import Outcome, train_many
from mupscale.sweep import SweepJob, run_sweep
from mupscale.sweep.attempts import trial_state
from mupscale.sweep.pruning import HALVING, MEDIAN, PruningRule, is_behind, make_pruner, trials_behind
from mupscale.sweep.space import Cell, Space, Sweep, Trial
from mupscale.sweep.storage import Storage
from mupscale.sweep.study import Study, TakenTrial
from mupscale.system.errors import MupscaleError
from mupscale.train import Recipe, Seeds, Spec
from small_runs import ADAMW, SGD, recipe

optuna = pytest.importorskip("optuna")

SPACE = Space((0.001, 0.01, 0.1), (0.0, 1.0))
PLACES = ["{}/study.db", "sqlite:///{}/study.db", "journal:{}/study.log"]


def study(place: str | Path, space: Space = SPACE, **changes: Any) -> Study:
    description = {"width": 8, **changes.pop("description", {})}
    return Study(str(place), "s", space, description, **{"steps": 20, **changes})


def finished(cell: Cell, loss: float = 1.0) -> Trial:
    return Trial(cell.lr, cell.noise, "finished", loss, [loss - 0.1, loss + 0.1], [(10, 2.0), (20, loss)], 20, 7.0)


def recipes(cell: Cell, optimizer: Spec = ADAMW, **changes: Any) -> list[Recipe]:
    made = Spec(optimizer.class_path, {**optimizer.init_args, "lr": cell.lr})
    return [recipe(optimizer=made, seeds=Seeds(init=s, data=s), **changes) for s in range(2)]


def task(make: Callable[[Cell], list[Recipe]] = recipes, **changes: Any) -> SweepJob:
    return SweepJob(**{"name": "s", "width": 8, "start": None, "space": SPACE, "recipes": make, "steps": 20, **changes})


def silent(text: str) -> None:
    pass


# ------------------------------------------------------------------------------------------------ which trials count


@pytest.mark.parametrize("place", PLACES)
def test_a_grid_is_taken_once_and_rebuilt_from_the_storage(place: str, tmp_path: Path) -> None:
    first = study(place.format(tmp_path))
    assert first.count_open() == 6
    held = first.take(4, "me")
    assert [one.cell for one in held] == SPACE.cells[:4]
    second = study(place.format(tmp_path))
    held += second.take(second.count_open(), "you")
    assert sorted(one.cell for one in held) == sorted(SPACE.cells)
    for one in held:
        assert first.finish(one.number, finished(one.cell, one.cell.lr), 2.0)
    third = study(place.format(tmp_path))
    assert third.count_open() == 0
    assert third.results() == [finished(cell, cell.lr) for cell in SPACE.cells]
    assert third.seconds() == 12.0
    assert third.study.trials[0].intermediate_values == {10: 2.0, 20: 0.001}  # for optuna's own tools


def test_of_two_trials_of_a_cell_the_later_one_is_void(tmp_path: Path) -> None:
    ours, theirs = study(tmp_path / "study.db"), study(tmp_path / "study.db")
    assert [one.cell for one in ours.take(2, "me")] == SPACE.cells[:2]
    assert theirs.take(2, "you") == []  # it has not looked, and begins the same two
    assert [trial_state(trial) for trial in ours.optuna_trials()] == ["running", "running", "void", "void"]
    assert [one.cell for one in theirs.take(4, "you")] == SPACE.cells[2:]


def test_trials_that_an_earlier_version_queued_are_taken_first(tmp_path: Path) -> None:
    made = study(tmp_path / "study.db")
    for cell in (SPACE.cells[2], SPACE.cells[2]):
        made.study.enqueue_trial(cell._asdict(), user_attrs={"cell": list(cell)})
    assert made.count_open() == 7
    taken = made.take(7, "me")
    assert [one.cell for one in taken] == [SPACE.cells[i] for i in (2, 0, 1, 3, 4, 5)]
    assert [trial_state(trial) for trial in made.optuna_trials()].count("void") == 1


def die(made: Study, count: int = 1) -> list[TakenTrial]:
    """Trials that a worker takes at once and dies of."""
    taken = made.take(count, "a")
    for one in taken:
        assert made.mark_dead(one.number)
    return taken


def test_a_trial_whose_worker_died_is_tried_without_limit(tmp_path: Path) -> None:
    made = study(tmp_path / "study.db", Space((0.1,)))
    first, *others = (die(made)[0] for _ in range(5) if made.count_open())
    assert [one.cell for one in others] == [first.cell] * 4
    assert made.optuna_trials()[others[-1].number].user_attrs["retry_of"] == first.number
    assert made.count_open() == 1


def test_or_a_number_of_times(tmp_path: Path) -> None:
    made = study(tmp_path / "study.db", Space((0.1,)), retries=2)
    for _ in range(3):
        assert made.count_open() == 1
        die(made)
    assert made.count_open() == 0
    assert made.attempts.given_up == {Cell(0.1, 0.0): "its worker died 3 times"}
    assert study(tmp_path / "study.db", Space((0.1,)), retries=3).count_open() == 1


def test_where_workers_die_again_trials_are_tried_in_ever_smaller_company(tmp_path: Path) -> None:
    made, sizes = study(tmp_path / "study.db"), list[int]()
    for _ in range(8):
        count = made.count_open()
        sizes.append(len(die(made, count)))
    assert sizes == [6, 6, 3, 3, 1, 1, 1, 1]  # a preemption is likelier the first time


def test_what_failed_alone_is_given_up_until_the_next_start(tmp_path: Path) -> None:
    made = study(tmp_path / "study.db", Space((0.1,)))
    (one,) = made.take(1, "me")
    assert made.mark_failed(one.number, "ValueError: so")
    assert made.count_open() == 0
    assert made.attempts.given_up == {one.cell: "ValueError: so"}
    assert study(tmp_path / "study.db", Space((0.1,))).count_open() == 1


def test_a_trial_given_back_is_no_retry(tmp_path: Path) -> None:
    made = study(tmp_path / "study.db", Space((0.1,)))
    for _ in range(3):
        (held,) = made.take(made.count_open(), "a")
        assert made.make_void(held.number, "given back")
    (held,) = made.take(made.count_open(), "a")
    assert "retry_of" not in made.optuna_trials()[held.number].user_attrs


@pytest.mark.parametrize("place", PLACES[1:])
def test_a_trial_that_another_told_stays_as_it_is(place: str, tmp_path: Path) -> None:
    ours, theirs = study(place.format(tmp_path), Space((0.1,))), study(place.format(tmp_path), Space((0.1,)))
    (held,) = ours.take(1, "us")
    assert theirs.finish(held.number, finished(held.cell, 1.0), 0.0)
    assert not ours.finish(held.number, finished(held.cell, 9.0), 0.0)
    assert not ours.mark_dead(held.number)
    assert ours.results() == [finished(held.cell, 1.0)]


def test_divergence_is_recorded_as_such_and_never_chosen(tmp_path: Path) -> None:
    made = study(tmp_path / "study.db", Space((0.01, 0.1)))
    good, bad = made.take(2, "me")
    assert made.finish(bad.number, Trial(*bad.cell, "diverged", None, [], [(5, 0.001)], 7, 3.0), 0.0)
    assert made.finish(good.number, finished(good.cell, 5.0), 0.0)
    assert made.results()[1] == Trial(*bad.cell, "diverged", None, [], [(5, 0.001)], 7, 3.0)
    assert made.study.best_trial.number == good.number
    assert made.study.trials[bad.number].value is None


# ------------------------------------------------------------------------------------------------ samplers


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_drawn_trials_are_counted_exactly_and_begin_with_zero_noise(sampler: str, tmp_path: Path) -> None:
    ours, theirs = (study(tmp_path / "study.db", sampler=sampler, trials=10) for _ in range(2))
    assert ours.sampler == sampler
    done: list[Cell] = []
    while any(one.count_open() for one in (ours, theirs)):
        for one in (ours, theirs):
            for held in one.take(3, "w"):
                done.append(held.cell)
                one.finish(held.number, finished(held.cell), 0.0)
    assert len(done) == len(set(done)) == 10
    assert [cell.noise for cell in done[:3]] == [0.0, 0.0, 0.0]
    assert all(0.001 <= cell.lr <= 0.1 and 0 <= cell.noise <= 1 for cell in done)
    assert sum(cell.noise > 0 for cell in done) == 7


def test_random_draws_the_same_cells_whoever_draws_them(tmp_path: Path) -> None:
    alone = study(tmp_path / "alone.db", sampler="random", trials=8)
    cells = {one.cell for one in alone.take(8, "w")}
    workers = [study(tmp_path / "two.db", sampler="random", trials=8) for _ in range(2)]
    found: set[Cell] = set()
    while workers[0].count_open():
        for worker in workers:
            found |= {one.cell for one in worker.take(1, "w")}
    assert found == cells


# ------------------------------------------------------------------------------------------------ pruning


def judge(
    rule: PruningRule, values: dict[tuple[float, float], dict[int, float]], step: int
) -> set[tuple[float, float]]:
    """Which of these (lr, noise) the rule lets go on at this of 100 steps."""
    some = optuna.distributions.FloatDistribution(0, 10)
    trials = [
        optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params={"lr": lr, "noise": noise},
            distributions={"lr": some, "noise": some},
            intermediate_values=losses,
        )
        for (lr, noise), losses in values.items()
    ]
    for number, trial in enumerate(trials):
        trial.number = number
    levels = sorted({noise for _, noise in values})
    kept = list(zip(values, trials, strict=True))
    one_by_one = {cell for cell, trial in kept if not is_behind(rule, trial, trials, step, 100, levels)}
    behind = trials_behind(rule, trials, step, 100, levels)
    assert {cell for cell, trial in kept if trial.number not in behind} == one_by_one
    return one_by_one


@pytest.mark.parametrize(("rule", "step"), [(HALVING, 10), (HALVING, 12), (MEDIAN, 15)])
def test_early_learning_rates_are_compared_at_equal_noise_alone(rule: PruningRule, step: int) -> None:
    # noise 2 starts far worse, as noise does: its best learning rates go on all the same
    values = {(lr, noise): {step: lr + 10 * noise} for lr in (1, 2, 3, 4, 5, 6) for noise in (0, 2)}
    assert judge(rule, values, step) == {(lr, noise) for lr in (1, 2, 3) for noise in (0, 2)}


@pytest.mark.parametrize(("rule", "first", "step"), [(HALVING, 10, 30), (MEDIAN, 15, 35)])
def test_late_everything_is_compared_by_where_it_leads(rule: PruningRule, first: int, step: int) -> None:
    # noise 2 is still worse, but falls while the others stand; the best of zero noise survives for the verdict
    values = {(lr, 0): {first: 5.0 + lr, step: 5.0 + lr} for lr in (1, 2, 3)}
    values |= {(lr, 2): {first: 19.0 + lr, step: 9.0 + lr} for lr in (1, 2, 3)}
    assert judge(rule, values, step) == {(1, 2), (2, 2), (3, 2), (1, 0)}


@pytest.mark.parametrize(("rule", "first", "step"), [(HALVING, 10, 10), (HALVING, 10, 30), (MEDIAN, 15, 35)])
def test_all_at_once_are_judged_as_one_by_one(rule: PruningRule, first: int, step: int) -> None:
    draw = random.Random(0)
    for _ in range(20):
        values = {
            (lr, noise): {first: draw.choice([1.0, draw.random(), math.nan]), step: draw.random()}
            for lr in range(1, 6)
            for noise in (0, 1, 2)
        }
        judge(rule, values, step)  # compares the two


def test_a_loss_that_is_no_number_is_behind() -> None:
    assert judge(HALVING, {(1, 0): {10: math.nan}, (2, 0): {10: 5.0}}, 10) == {(2, 0)}


def test_the_rules_serve_as_pruners_of_optuna() -> None:
    made = optuna.create_study(pruner=make_pruner("halving", 100, (0.0, 1.0)))
    ranges = {"noise": optuna.distributions.FloatDistribution(0, 1)}
    for _ in range(6):
        made.enqueue_trial({"noise": 1.0})
    trials = [made.ask(ranges) for _ in range(6)]
    for value, trial in enumerate(trials):
        trial.report(value, 9)
        assert not trial.should_prune()  # no rung
        trial.report(value, 10)
    assert [trial.should_prune() for trial in trials] == [False, False, False, True, True, True]


EIGHT = Space((0.0001, 0.001, 0.01, 0.1), (0.0, 1.0))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A sweep of which nothing was stopped."""
    return run_sweep(task(space=EIGHT), f"journal:{tmp_path_factory.mktemp('whole') / 'study'}", note=silent)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """The usual sweep."""
    return run_sweep(task(), f"journal:{tmp_path_factory.mktemp('plain') / 'study'}", note=silent)


@pytest.mark.parametrize(
    ("pruner", "engine"),
    [
        ("median", "auto"),
        ("halving", "auto"),
        ("median", "serial"),
        pytest.param("halving", "serial", marks=pytest.mark.slow),
    ],
)
def test_a_pruned_sweep_costs_less_and_keeps_zero_noise(pruner: Any, engine: Any, whole: Sweep, tmp_path: Path) -> None:
    found = run_sweep(task(space=EIGHT, pruner=pruner, engine=engine), f"journal:{tmp_path / 'pruned'}", note=silent)
    assert len(found.trials) == len(whole.trials) == 8
    assert found.flops < (0.6 if engine == "auto" else 1.0) * whole.flops  # one at a time there is less to compare
    assert any(trial.status == "finished" and trial.noise == 0 for trial in found.trials)
    stopped = [trial for trial in found.trials if trial.status == "pruned"]
    assert stopped
    assert all(trial.loss is None and len(trial.by_seed) == 2 for trial in stopped)
    assert engine == "serial" or all(trial.steps < 20 for trial in stopped)
    if engine == "auto":
        assert found.best.loss == pytest.approx(whole.best.loss, rel=1e-9)


# ------------------------------------------------------------------------------------------------ a whole sweep


@pytest.mark.parametrize("place", PLACES)
def test_a_sweep_is_its_trials_over_all_seeds(place: str, tmp_path: Path) -> None:
    found = run_sweep(task(), place.format(tmp_path), note=silent)
    assert [trial.cell for trial in found.trials] == SPACE.cells
    assert found.seeds == 2
    for trial in found.trials:
        assert trial.status == "finished"
        assert trial.loss == pytest.approx(sum(trial.by_seed) / 2)
        assert trial.curve[-1][0] == trial.steps == 20
        assert trial.flops > 0
    again = run_sweep(task(recipes), place.format(tmp_path), note=silent)
    assert again == found  # nothing is trained twice
    assert Sweep.from_json(found.to_json()) == found


def test_one_at_a_time_gives_the_same(plain: Sweep, tmp_path: Path) -> None:
    apart = run_sweep(task(engine="serial"), f"journal:{tmp_path / 'study'}", note=silent)
    for one, other in zip(plain.trials, apart.trials, strict=True):
        assert one.cell == other.cell
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.flops == other.flops


def test_held_out_loss_is_what_is_minimised_if_asked(plain: Sweep, tmp_path: Path) -> None:
    held_out = run_sweep(task(measure="held-out"), f"journal:{tmp_path / 'study'}", note=silent)
    assert held_out.measure == "held-out"
    assert all(abs(a.loss - b.loss) > 1e-3 for a, b in zip(plain.trials, held_out.trials, strict=True))  # type: ignore[operator]


def fail_where(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Recipe], bool]) -> None:
    """From now on training fails where it meets such a recipe, as it does where memory ends."""

    def train(recipes: Sequence[Recipe], **options: Any) -> list[Outcome]:
        if any(map(wrong, recipes)):
            raise MemoryError("no memory left, say")
        return train_many(recipes, **options)

    monkeypatch.setattr("mupscale.sweep.search.train_many", train)


@pytest.mark.parametrize("engine", ["auto", "serial"])
def test_what_fails_by_itself_is_given_up_and_the_rest_is_trained(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"journal:{tmp_path / 'study'}"
    why = r"s is not complete.*2 of 6 trials are missing: lr 0.1 and noise 0 \(MemoryError: no memory left, say\)"
    with monkeypatch.context() as patch:
        fail_where(patch, lambda recipe: recipe.optimizer.init_args["lr"] == 0.1)
        with pytest.raises(MupscaleError, match=why):
            run_sweep(task(engine=engine), place, note=silent)
    states = [trial_state(trial) for trial in study(place, description=task().description()).optuna_trials()]
    assert states.count("finished") == 4
    assert states.count("failed") == 2
    assert set(states) <= {"finished", "failed", "void"}
    found = run_sweep(task(engine=engine), place, note=silent)  # mended: the same command tries them again
    assert [trial.status for trial in found.trials] == ["finished"] * 6


def test_where_nothing_can_be_trained_the_error_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"journal:{tmp_path / 'study'}"
    fail_where(monkeypatch, lambda recipe: True)
    with pytest.raises(MemoryError, match="no memory left, say"):
        run_sweep(task(), place, note=silent)
    assert study(place, description=task().description()).count_running() == 0


def test_all_trials_diverged(tmp_path: Path) -> None:
    def wild(cell: Cell) -> list[Recipe]:
        return recipes(cell, SGD)

    found = run_sweep(task(wild, space=Space((1e30, 1e31))), str(tmp_path / "study.db"), note=silent)
    assert [trial.status for trial in found.trials] == ["diverged", "diverged"]
    with pytest.raises(MupscaleError, match=r"all 2 trials diverged.*below 1e\+30"):
        _ = found.best


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"space": Space((0.001, 0.01), (0.0, 1.0))}, r"lrs is \[0.001, 0.01, 0.1\] there and \[0.001, 0.01\] here"),
        ({"space": Space(SPACE.lrs, (0.0, 2.0))}, r"noises is \[0.0, 1.0\] there and \[0.0, 2.0\] here"),
        ({"steps": 30}, "steps is 20 there and 30 here"),
        ({"width": 16}, "width is 8 there and 16 here"),
        ({"start": 4}, "start is null there and 4 here"),
        ({"measure": "held-out"}, 'measure is "train" there and "held-out" here'),
        ({"make": lambda cell: recipes(cell, batch=16)}, "recipe.batch is 8 there and 16 here"),
        ({"make": lambda cell: recipes(cell)[:1]}, "seeds is"),
    ],
)
def test_another_study_of_the_same_name(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    small = Space(SPACE.lrs, (0.0, 1.0))
    study(tmp_path / "study.db", small, description=task().description())
    with pytest.raises(MupscaleError, match=rf"the study s in .*{why}.*; choose another name or storage"):
        run_sweep(task(**change), str(tmp_path / "study.db"), note=silent)


def test_the_learning_rate_and_the_noise_are_what_a_study_is_about(tmp_path: Path) -> None:
    assert task().description() == task(space=Space((0.5,))).description()


@pytest.mark.parametrize("name", ["a?b", "50%", "a#b", "a b", "ä", "{x}", "%3Fmode=memory"])
def test_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    one = Space((0.1,))
    (held,) = study(folder / "study.db", one).take(1, "me")
    assert (folder / "study.db").stat().st_size > 0
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert study(folder / "study.db", one).finish(held.number, finished(held.cell), 0.0)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("{}/no/study.db", "unable to open database file"),
        ("journal:{}/no/study.log", "No such file or directory"),
        ("{}/text", "not a database"),
        ("journal:{}/text", "no journal of optuna's"),
        ("nosuch://me:secret@host/db", "nosuch"),
        ("postgresql+nosuch://me:secret@host/db", "nosuch"),
    ],
)
def test_a_storage_that_cannot_be_opened(place: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello\n" * 1000)
    with pytest.raises(MupscaleError, match=f"the study's storage .* cannot be opened: .*{why}") as caught:
        study(place.format(tmp_path), patience=1.0)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_not_there() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(MupscaleError, match=r"postgresql://me:\*\*\*@127.0.0.1:1/db cannot be opened: .*refused"):
        study("postgresql://me:secret@127.0.0.1:1/db", patience=1.0)


def test_a_storage_locked_for_long_and_nothing_lost(tmp_path: Path) -> None:
    made = study(tmp_path / "study.db", patience=0.5)
    first, second = made.take(2, "me")
    assert made.finish(first.number, finished(first.cell), 0.0)
    other = sqlite3.connect(tmp_path / "study.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(MupscaleError, match=r"cannot be used: another process has kept it locked for more than 0.5 s"):
        made.finish(second.number, finished(second.cell), 0.0)
    other.execute("ROLLBACK")
    assert made.finish(second.number, finished(second.cell), 0.0)
    assert len(made.results()) == 2


def test_a_storage_that_goes_away(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    made = study(f"journal:{tmp_path}/here/study.log", patience=0.3)
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(MupscaleError, match=r"cannot be used: No such file.*; all that it was told is kept"):
        made.take(1, "me")
    (tmp_path / "there").rename(tmp_path / "here")
    assert len(made.take(1, "me")) == 1


def test_a_study_that_is_deleted(tmp_path: Path) -> None:
    made = study(tmp_path / "study.db")
    optuna.delete_study(study_name="s", storage=made.storage.optuna)
    with pytest.raises(MupscaleError, match="the study has been deleted"):
        made.set_attribute("x", 1)


def test_half_a_line_in_a_journal_does_no_harm(tmp_path: Path) -> None:
    study(f"journal:{tmp_path}/study.log")
    with open(tmp_path / "study.log", "ab") as file:
        file.write(b'{"op_code":4,"worker_id":"x","study')  # a worker killed, or a disk full, in the middle of a line
    again = study(f"journal:{tmp_path}/study.log")
    assert len(again.take(6, "me")) == 6
    assert len(study(f"journal:{tmp_path}/study.log").optuna_trials()) == 6


def test_no_trial_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match="at_once is 0"):
        run_sweep(task(), str(tmp_path / "study.db"), at_once=0)


def test_what_is_no_storage_error_is_not_dressed_up_as_one(tmp_path: Path) -> None:
    def wrong() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Storage(tmp_path / "study.db").use(wrong)
