"""The study of a sweep: which trials count, what is stopped early, and one sentence for whatever is wrong."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mupscale.engine import Outcome, train_many
from mupscale.study import run_sweep
from mupscale.study.search import combine_seeds
from mupscale.study.space import Cell, Space, Sweep, Tried, sweep_remarks
from mupscale.study.trials import HALVING, MEDIAN, PATIENCE, PruningRule, Storage, SweepTrials, trial_state
from mupscale.system import MupscaleError, parse_record
from mupscale.train import Recipe
from paper_runs import SPACE, quiet, sweep_job, two_seeds
from slow_cases import with_slow
from small_runs import SGD, recipe

optuna = pytest.importorskip("optuna")

ONE = Space((0.1,))
PLACES = ["{}/study.db", "sqlite:///{}/study.db", "journal:{}/study.log"]


def study(
    place: str | Path, space: Space = SPACE, *, patience: float = PATIENCE, retries: int | None = None, **changes: Any
) -> SweepTrials:
    return SweepTrials(sweep_job(space=space, **changes), Storage(place, patience), retries)


def count_open(made: SweepTrials) -> int:
    """How many trials are still to be taken, with what others have done by now."""
    made.refresh()
    return made.count_open()


def finished(cell: Cell, loss: float = 1.0) -> Tried:
    return Tried(*cell, [loss, loss], curve=[(10, 2.0), (20, loss)], steps=20, cost=7.0)


def states(made: SweepTrials) -> list[str]:
    made.refresh()
    return [trial_state(trial) for trial in made.known]


# ------------------------------------------------------------------------------------------------ which trials count


@pytest.mark.quick("{}/study.db", "journal:*")
@pytest.mark.parametrize("place", PLACES)
def test_a_grid_is_taken_once_and_rebuilt_from_the_storage(place: str, tmp_path: Path) -> None:
    first = study(place.format(tmp_path))
    assert count_open(first) == 6
    held = first.take(4, "me")
    assert list(held.values()) == SPACE.cells[:4]
    second = study(place.format(tmp_path))
    held |= second.take(count_open(second), "you")
    assert sorted(held.values()) == sorted(SPACE.cells)
    for number, cell in held.items():
        assert first.finish(number, finished(cell, cell.lr), 2.0)
    third = study(place.format(tmp_path))
    assert count_open(third) == 0
    assert third.read_results().trials == [finished(cell, cell.lr) for cell in SPACE.cells]
    assert third.read_results().seconds == 12.0
    assert third.study.trials[0].intermediate_values == {10: 2.0, 20: 0.001}  # for optuna's own tools


def test_of_two_trials_of_a_cell_the_later_one_is_void(tmp_path: Path) -> None:
    ours, theirs = study(f"journal:{tmp_path}/study.log"), study(f"journal:{tmp_path}/study.log")
    assert list(ours.take(2, "me").values()) == SPACE.cells[:2]
    assert theirs.take(2, "you") == {}  # it has not looked, and begins the same two
    assert states(ours) == ["running", "running", "void", "void"]
    assert list(theirs.take(4, "you").values()) == SPACE.cells[2:]


def die(made: SweepTrials, count: int = 1) -> list[int]:
    """The numbers of trials that a worker takes at once and dies of."""
    taken = made.take(count, "a")
    for number in taken:
        assert made.drop(number)
    return list(taken)


def test_a_trial_whose_worker_died_is_tried_without_limit_or_a_number_of_times(tmp_path: Path) -> None:
    made = study(f"journal:{tmp_path}/endless.log", ONE)
    first, *others = (die(made)[0] for _ in range(5) if count_open(made))
    assert len(others) == 4
    assert count_open(made) == 1
    assert made.known[others[-1]].user_attrs["retry_of"] == first
    made = study(f"journal:{tmp_path}/study.log", ONE, retries=2)
    for _ in range(3):
        assert count_open(made) == 1
        die(made)
    assert count_open(made) == 0
    assert made.given_up == {Cell(0.1, 0.0): "its worker died 3 times"}
    assert study(f"journal:{tmp_path}/study.log", ONE, retries=3).count_open() == 1


def test_where_workers_die_again_trials_are_tried_in_ever_smaller_company(tmp_path: Path) -> None:
    made, sizes = study(f"journal:{tmp_path}/study.log"), list[int]()
    for _ in range(8):
        count = count_open(made)
        sizes.append(len(die(made, count)))
    assert sizes == [6, 6, 3, 3, 1, 1, 1, 1]  # a preemption is likelier the first time


def test_what_failed_alone_is_given_up_until_the_next_start(tmp_path: Path) -> None:
    made = study(f"journal:{tmp_path}/study.log", ONE)
    ((number, cell),) = made.take(1, "me").items()
    assert made.drop(number, error="ValueError: so")
    assert count_open(made) == 0
    assert made.given_up == {cell: "ValueError: so"}
    assert study(f"journal:{tmp_path}/study.log", ONE).count_open() == 1


def test_a_trial_given_back_is_no_retry(tmp_path: Path) -> None:
    made = study(f"journal:{tmp_path}/study.log", ONE)
    for _ in range(3):
        (held,) = made.take(count_open(made), "a")
        assert made.drop(held, void="given back")
    (held,) = made.take(count_open(made), "a")
    assert "retry_of" not in made.known[held].user_attrs


@pytest.mark.parametrize("place", PLACES[1:])
def test_a_trial_that_another_told_stays_as_it_is(place: str, tmp_path: Path) -> None:
    ours, theirs = study(place.format(tmp_path), ONE), study(place.format(tmp_path), ONE)
    ((number, cell),) = ours.take(1, "us").items()
    assert theirs.finish(number, finished(cell, 1.0), 0.0)
    assert not ours.finish(number, finished(cell, 9.0), 0.0)
    assert not ours.drop(number)
    assert ours.read_results().trials == [finished(cell, 1.0)]


def test_divergence_is_recorded_as_such_and_never_chosen(tmp_path: Path) -> None:
    made = study(f"journal:{tmp_path}/study.log", Space((0.01, 0.1)))
    (good, well), (bad, wild) = made.take(2, "me").items()
    lost = Tried(*wild, [None, None], curve=[(5, 0.001)], steps=7, cost=3.0)
    assert made.finish(bad, lost, 0.0)
    assert made.finish(good, finished(well, 5.0), 0.0)
    assert made.read_results().trials[1] == lost
    assert made.study.best_trial.number == good
    assert made.study.trials[bad].value is None


# ------------------------------------------------------------------------------------------------ samplers


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_drawn_trials_are_counted_exactly_and_begin_with_zero_noise(sampler: str, tmp_path: Path) -> None:
    ours, theirs = (study(f"journal:{tmp_path}/study.log", sampler=sampler, trials=10) for _ in range(2))
    done: list[Cell] = []
    while any(count_open(one) for one in (ours, theirs)):
        for one in (ours, theirs):
            for number, cell in one.take(3, "w").items():
                done.append(cell)
                one.finish(number, finished(cell), 0.0)
    assert len(done) == len(set(done)) == 10
    assert [cell.noise for cell in done[:3]] == [0.0, 0.0, 0.0]
    assert all(0.001 <= cell.lr <= 0.1 and 0 <= cell.noise <= 1 for cell in done)
    assert sum(cell.noise > 0 for cell in done) == 7


def test_random_draws_the_same_cells_whoever_draws_them(tmp_path: Path) -> None:
    alone = study(f"journal:{tmp_path}/alone.log", sampler="random", trials=8)
    cells = set(alone.take(8, "w").values())
    workers = [study(f"journal:{tmp_path}/two.log", sampler="random", trials=8) for _ in range(2)]
    found: set[Cell] = set()
    while count_open(workers[0]):
        for worker in workers:
            found |= set(worker.take(1, "w").values())
    assert found == cells


def test_factors_of_the_embeddings_rate_are_searched_as_noise_is(tmp_path: Path) -> None:
    """Without a zero, on a logarithmic scale, and one factor in one batch, which trains as one program."""
    space = Space((0.01, 0.1), (4.0, 1.0), "embeddings")
    assert space.noises == (1.0, 4.0)
    made = study(f"journal:{tmp_path}/log", space)
    first = made.take(3, "me")
    assert list(first.values()) == [Cell(0.01, 1.0), Cell(0.1, 1.0)]
    for number, cell in (first | made.take(3, "me")).items():
        made.finish(number, finished(cell, loss=10 - cell.noise), 1.0)
    results = made.read_results()
    assert (results.best.cell, results.second) == (Cell(0.01, 4.0), "embeddings")
    assert made.known[0].params == {"lr": 0.01, "embeddings": 1.0}
    assert "the best embeddings, 4, is the largest tried: try 4, 16, 64" in sweep_remarks(results)
    drawn = study(f"journal:{tmp_path}/log", space, name="drawn", sampler="random", trials=20)
    assert all(1 <= cell.noise <= 4 for cell in drawn.to_do)
    assert len({cell.noise for cell in drawn.to_do}) > 10
    with pytest.raises(MupscaleError, match="at least one factor of the embeddings' rate, and all of them above 0"):
        Space((0.1,), (0.0, 1.0), "embeddings")


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
    space = Space((1.0,), tuple(noise for _, noise in values))
    behind = rule.find_behind(trials, step, 100, space)
    return {cell for number, cell in enumerate(values) if number not in behind}


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


def test_a_loss_that_is_no_number_is_behind() -> None:
    assert judge(HALVING, {(1, 0): {10: math.nan}, (2, 0): {10: 5.0}}, 10) == {(2, 0)}


EIGHT = Space((0.0001, 0.001, 0.01, 0.1), (0.0, 1.0))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A sweep of which nothing was stopped."""
    return run_sweep(sweep_job(space=EIGHT), f"journal:{tmp_path_factory.mktemp('whole') / 'study'}", note=quiet)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """The usual sweep."""
    return run_sweep(sweep_job(), f"journal:{tmp_path_factory.mktemp('plain') / 'study'}", note=quiet)


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
    found = run_sweep(
        sweep_job(space=EIGHT, pruner=pruner, engine=engine), f"journal:{tmp_path / 'pruned'}", note=quiet
    )
    assert len(found.trials) == len(whole.trials) == 8
    assert found.flops < (0.6 if engine == "auto" else 1.0) * whole.flops  # one at a time there is less to compare
    assert any(trial.status == "finished" and trial.noise == 0 for trial in found.trials)
    stopped = [trial for trial in found.trials if trial.status == "stopped"]
    assert stopped
    assert all(trial.loss is None and len(trial.finite) == 2 and trial.steps < 20 for trial in stopped)
    if engine == "auto":
        assert found.best.loss == pytest.approx(whole.best.loss, rel=1e-9)


# ------------------------------------------------------------------------------------------------ a whole sweep


@pytest.mark.quick("{}/study.db", "journal:*")
@pytest.mark.parametrize("place", PLACES)
def test_a_sweep_is_its_trials_over_all_seeds(place: str, tmp_path: Path) -> None:
    found = run_sweep(sweep_job(), place.format(tmp_path), note=quiet)
    assert [trial.cell for trial in found.trials] == SPACE.cells
    for trial in found.trials:
        assert trial.status == "finished"
        assert len(trial.losses) == 2
        assert trial.loss == pytest.approx(sum(trial.finite) / 2)
        assert trial.curve[-1][0] == trial.steps == 20
        assert trial.cost > 0
    again = run_sweep(sweep_job(), place.format(tmp_path), note=quiet)
    assert again == found  # nothing is trained twice
    assert parse_record(Sweep, asdict(found)) == found


def test_a_trial_of_which_one_seed_was_stopped_is_stopped() -> None:
    """One at a time, the other seed may have come to its end before."""
    curves = {"finished": [(10, 2.0), (20, 1.0)], "pruned": [(10, 3.0)]}
    ends = [Outcome(recipe(), status, curve[-1][0], curve) for status, curve in curves.items()]  # type: ignore[arg-type]
    found = combine_seeds(Cell(0.1, 0.0), ends, sweep_job())
    assert (found.status, found.steps, found.budget, found.losses) == ("stopped", 10, 0.5, [1.0, 3.0])
    lost = Outcome(recipe(), "diverged", 5, [])
    assert combine_seeds(Cell(0.1, 0.0), [*ends, lost], sweep_job()).status == "diverged"


@pytest.mark.slow
def test_one_at_a_time_gives_the_same(plain: Sweep, tmp_path: Path) -> None:
    apart = run_sweep(sweep_job(engine="serial"), f"journal:{tmp_path / 'study'}", note=quiet)
    for one, other in zip(plain.trials, apart.trials, strict=True):
        assert one.cell == other.cell
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.cost == other.cost


def test_held_out_loss_is_what_is_minimised_if_asked(plain: Sweep, tmp_path: Path) -> None:
    held_out = run_sweep(sweep_job(measure="held-out"), f"journal:{tmp_path / 'study'}", note=quiet)
    assert held_out.measure == "held-out"
    assert all(abs(a.loss - b.loss) > 1e-3 for a, b in zip(plain.trials, held_out.trials, strict=True))  # type: ignore[operator]


def fail_where(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Recipe], bool]) -> None:
    """From now on training fails where it meets such a recipe, as it does where memory ends."""

    def train(recipes: Sequence[Recipe], **options: Any) -> list[Outcome]:
        if any(map(wrong, recipes)):
            raise MemoryError("no memory left, say")
        return train_many(recipes, **options)

    monkeypatch.setattr("mupscale.study.search.train_many", train)


@pytest.mark.quick("auto")
@pytest.mark.parametrize("engine", ["auto", "serial"])
def test_what_fails_by_itself_is_given_up_and_the_rest_is_trained(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"journal:{tmp_path / 'study'}"
    why = r"s is not complete.*2 of 6 trials are missing: lr 0.1 and noise 0 \(MemoryError: no memory left, say\)"
    with monkeypatch.context() as patch:
        fail_where(patch, lambda recipe: recipe.optimizer.init_args["lr"] == 0.1)
        with pytest.raises(MupscaleError, match=why):
            run_sweep(sweep_job(engine=engine), place, note=quiet)
    left = states(study(place))
    assert left.count("finished") == 4
    assert left.count("failed") == 2
    assert set(left) <= {"finished", "failed", "void"}
    found = run_sweep(sweep_job(engine=engine), place, note=quiet)  # mended: the same command tries them again
    assert [trial.status for trial in found.trials] == ["finished"] * 6


def test_where_nothing_can_be_trained_the_error_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"journal:{tmp_path / 'study'}"
    fail_where(monkeypatch, lambda recipe: True)
    with pytest.raises(MemoryError, match="no memory left, say"):
        run_sweep(sweep_job(), place, note=quiet)
    assert not study(place).running


def test_all_trials_diverged(tmp_path: Path) -> None:
    def wild(cell: Cell) -> list[Recipe]:
        return two_seeds(cell, SGD)

    found = run_sweep(sweep_job(wild, space=Space((1e30, 1e31))), f"journal:{tmp_path}/study.log", note=quiet)
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
        ({"recipes": lambda cell: two_seeds(cell, batch=16)}, "recipe.batch is 8 there and 16 here"),
        ({"recipes": lambda cell: two_seeds(cell)[:1]}, "seeds is"),
    ],
)
def test_another_study_of_the_same_name(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    study(f"journal:{tmp_path}/study.log")
    with pytest.raises(MupscaleError, match=rf"the study s in .*{why}.*; choose another name or storage"):
        run_sweep(sweep_job(**change), f"journal:{tmp_path}/study.log", note=quiet)


NAMES = ["a?b", "50%", "a#b", "a b", "ä", "{x}", "%3Fmode=memory"]


@pytest.mark.quick("a?b")
@pytest.mark.parametrize("name", with_slow(NAMES, ["a?b", "%3Fmode=memory"]))
def test_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    ((number, cell),) = study(folder / "study.db", ONE).take(1, "me").items()
    assert (folder / "study.db").stat().st_size > 0
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert study(folder / "study.db", ONE).finish(number, finished(cell), 0.0)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("{}/no/study.db", "unable to open database file"),
        ("journal:{}/no/study.log", "No such file or directory"),
        ("{}/text", "not a database"),
        ("journal:{}/text", "not a journal of optuna's"),
        ("nosuch://me:secret@host/db", "nosuch"),
        ("postgresql+nosuch://me:secret@host/db", "nosuch"),
        ("postgresql://me:secret@127.0.0.1:1/db", "refused"),
    ],
)
def test_a_storage_that_cannot_be_opened(place: str, why: str, tmp_path: Path) -> None:
    if place.startswith("postgresql:"):
        pytest.importorskip("psycopg")
    (tmp_path / "text").write_text("hello\n" * 1000)
    with pytest.raises(MupscaleError, match=f"the study's storage .* cannot be opened: .*{why}") as caught:
        study(place.format(tmp_path), patience=1.0)
    assert ("secret" in place) == ("://me:***@" in str(caught.value))
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_storage_locked_for_long_and_nothing_lost(tmp_path: Path) -> None:
    made = study(tmp_path / "study.db", patience=0.5)
    (first, cell), (second, other_cell) = made.take(2, "me").items()
    assert made.finish(first, finished(cell), 0.0)
    other = sqlite3.connect(tmp_path / "study.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(MupscaleError, match=r"cannot be used: another process has kept it locked for more than 0.5 s"):
        made.finish(second, finished(other_cell), 0.0)
    other.execute("ROLLBACK")
    assert made.finish(second, finished(other_cell), 0.0)
    assert len(made.read_results().trials) == 2


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
        made.check_description()


def test_half_a_line_in_a_journal_does_no_harm(tmp_path: Path) -> None:
    study(f"journal:{tmp_path}/study.log")
    with open(tmp_path / "study.log", "ab") as file:
        file.write(b'{"op_code":4,"worker_id":"x","study')  # a worker killed, or a disk full, in the middle of a line
    again = study(f"journal:{tmp_path}/study.log")
    assert len(again.take(6, "me")) == 6
    assert len(study(f"journal:{tmp_path}/study.log").known) == 6


def test_no_trial_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match="at_once is 0"):
        run_sweep(sweep_job(), f"journal:{tmp_path}/study.log", at_once=0)


def test_what_is_no_storage_error_is_not_dressed_up_as_one(tmp_path: Path) -> None:
    def wrong() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Storage(tmp_path / "study.db").use(wrong)
