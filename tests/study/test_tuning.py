"""Which values a contender takes: the lowest mean, not next to divergence without need, and remarks about the grid."""

from __future__ import annotations

import pytest

from mupscale.study import Tried
from mupscale.study.pay import choose, list_promising
from mupscale.system import MupscaleError


def test_the_lowest_mean_wins() -> None:
    tuned = choose("fresh", [Tried(0.1, 0.0, [2.0]), Tried(0.2, 0.0, [1.0]), Tried(0.4, 0.0, [3.0])])
    assert (tuned.lr, tuned.noise, tuned.remarks) == (0.2, 0.0, [])


def test_next_to_divergence_loses_only_to_what_is_as_good() -> None:
    edge, gone = Tried(0.2, 0.0, [1.0, 1.2]), Tried(0.4, 0.0, [None, 1.0])
    lower = Tried(0.05, 0.0, [3.0, 3.0])
    assert choose("fresh", [lower, Tried(0.1, 0.0, [1.1, 1.25]), edge, gone]).lr == 0.1
    kept = choose("fresh", [lower, Tried(0.1, 0.0, [1.6, 1.7]), edge, gone])
    assert kept.lr == 0.2
    assert kept.remarks == ["fresh: the best learning rate, 0.2, is the last before divergence"]


def test_divergence_at_another_noise_does_not_count() -> None:
    cells = [Tried(0.1, 1.0, [1.0]), Tried(0.2, 2.0, [None]), Tried(0.2, 1.0, [2.0]), Tried(0.05, 1.0, [2.0])]
    assert choose("copies", [*cells, Tried(0.1, 0.5, [2.0])]).remarks == []


def test_only_those_with_all_seeds_may_be_chosen() -> None:
    cells = [Tried(0.1, 0.0, [0.9]), Tried(0.2, 0.0, [1.0, 1.0]), Tried(0.4, 0.0, [1.5, 1.5])]
    assert choose("fresh", cells, among={(0.2, 0.0), (0.4, 0.0)}).lr == 0.2


def test_all_diverged_is_one_sentence() -> None:
    with pytest.raises(MupscaleError, match=r"from-scratch: all 2 trials .* diverged.*0.1 to 0.2.*StudySettings.lrs"):
        choose("from-scratch", [Tried(0.1, 0.0, [None]), Tried(0.2, 0.0, [None])])


def test_what_was_stopped_early_is_not_chosen_and_has_not_diverged() -> None:
    early = Tried(0.4, 0.0, [0.5], budget=0.25)
    tuned = choose("fresh", [Tried(0.1, 0.0, [1.2]), Tried(0.2, 0.0, [1.0]), early])
    assert (tuned.lr, tuned.remarks) == (0.2, [])


def test_those_within_the_margin_and_beside_the_best_go_on() -> None:
    far, left, best, right = (
        Tried(lr, 1.0, [loss]) for lr, loss in zip((1, 2, 4, 8), (2.0, 1.9, 1.0, 1.8), strict=True)
    )
    near, other = Tried(8, 2.0, [1.05]), Tried(4, 2.0, [1.2])
    assert list_promising([near, far, best, right, left, other], 0.1) == [near, best, right, left]


def test_a_margin_below_zero_is_as_wide() -> None:
    cells = [Tried(lr, 0.0, [loss]) for lr, loss in zip((1, 2, 4, 8), (-2.0, -1.0, -1.9, -1.95), strict=True)]
    assert [cell.lr for cell in list_promising(cells, 0.06)] == [1, 2, 4, 8]
    assert [cell.lr for cell in list_promising(cells, 0.03)] == [1, 2, 8]


def test_where_all_have_diverged_none_goes_on() -> None:
    assert list_promising([Tried(1, 0.0, [None]), Tried(2, 0.0, [None])], 0.1) == []
