"""The commands `mupscale limit …`: examples, mlp, sweep, grow. Each prints tables, and writes pictures and results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupscale.cli.arguments import installed
from mupscale.cli.infinite_width_options import (
    choose_device,
    make_batch,
    make_network,
    read_examples_options,
    read_grow_options,
    read_mlp_options,
    read_sweep_options,
    settings_of,
)
from mupscale.cli.infinite_width_tables import (
    print_best,
    print_comparison,
    print_conditions,
    print_example,
    print_ways,
)
from mupscale.cli.output_places import may_write_nothing, print_place
from mupscale.system import Diverged, MupscaleError, open_display, show, wrap_text

if TYPE_CHECKING:
    from mupscale.sweep import Space, Sweep
    from mupscale.theory import Experiment, Settings


@may_write_nothing("--revealed")
def limit_examples_command(words: list[str]) -> int:
    """mupscale limit examples."""
    options = read_examples_options(words)
    from mupscale.theory import limit_pictures, limit_study, measure_conditions

    settings = _example_settings(options)
    gallery = limit_pictures.open_gallery(Path(options.out))
    with _bar(2 * (2 + options.networks * len(options.widths)), "networks") as tick, _memory_errors_in_words():
        examples = [
            limit_study.worked_example(
                number,
                settings,
                options.target,
                options.widths,
                networks=options.networks,
                dense=not options.revealed,
                tick=tick,
            )
            for number in (1, 2)
        ]
    checks = measure_conditions(settings)
    for example in examples:
        limit_pictures.draw_outputs(example, gallery)
    limit_pictures.draw_errors({f"example {example.number}": example.comparison for example in examples}, gallery)
    for example in examples:
        print_example(example)
    print_conditions(checks)
    results = {
        "settings": settings_of(options),
        "examples": {str(example.number): example.to_json() for example in examples},
        "conditions": [check._asdict() for check in checks],
    }
    return _write_results(gallery.folder, results)


def _example_settings(options: Any) -> Settings:
    from mupscale.theory import Settings

    return Settings(
        slope=lambda y: y - options.target,
        lr=options.lr,
        upscaled_lr=options.upscaled_lr,
        before=options.steps,
        after=options.after,
        x=options.x,
        sigma=options.sigma,
        times=options.times,
        noise=tuple(zip("ABCD", options.noise, strict=True)),
    )


@may_write_nothing("--revealed")
def limit_mlp_command(words: list[str]) -> int:
    """mupscale limit mlp."""
    options = read_mlp_options(words)
    from mupscale.theory import Experiment, Stage, limit_pictures, limit_study

    noise = options.noise[0] if len(options.noise) == 1 else options.noise
    rate = options.lr if options.upscaled_lr is None else options.upscaled_lr
    stages = [Stage(options.steps, options.lr), *(Stage(options.after, rate, times, noise) for times in options.times)]
    experiment = Experiment(make_network(options), *make_batch(options), stages)
    device = choose_device(options)
    gallery = limit_pictures.open_gallery(Path(options.out))
    with _bar(options.seeds + options.networks * len(options.widths), "networks") as tick, _memory_errors_in_words():
        comparison = limit_study.compare_with_limit(
            experiment,
            options.widths,
            samples=options.samples,
            seeds=options.seeds,
            networks=options.networks,
            device=device,
            dense=not options.revealed,
            tick=tick,
            note=limit_study.ignore,  # it is printed below the table
        )
    limit_pictures.draw_losses({"": comparison}, gallery)
    limit_pictures.draw_copies(comparison, gallery)
    limit_pictures.draw_preactivations(comparison, gallery)
    limit_pictures.draw_errors({"": comparison}, gallery)
    print_comparison(comparison)
    return _write_results(gallery.folder, {"settings": settings_of(options), "meeting": comparison.to_json()})


@may_write_nothing("--revealed")
def limit_sweep_command(words: list[str]) -> int:
    """mupscale limit sweep."""
    options = read_sweep_options(words)
    from mupscale.sweep import Space
    from mupscale.theory import Experiment, Stage, limit_pictures, limit_study

    space = Space(tuple(options.lrs), tuple(options.noises))
    experiment = Experiment(make_network(options), *make_batch(options), [Stage(options.steps, options.lr)])
    device = choose_device(options)
    gallery = limit_pictures.open_gallery(Path(options.out))
    notes = list[str]()
    sweeps = _run_sweeps(options, experiment, space, device, notes.append)
    for sweep in sweeps:
        limit_pictures.draw_sweep(sweep, gallery, options.lr)
    results = {"settings": settings_of(options), "sweeps": [asdict(sweep) for sweep in sweeps]}
    if not any(trial.loss is not None for sweep in sweeps for trial in sweep.trials):
        limit_study.save_results(gallery.folder / "results.json", results)
        _ = sweeps[0].best  # raises: all diverged
    print_best(sweeps)
    for note in notes:
        show(wrap_text(f"Note: {note}."))
    return _write_results(gallery.folder, results)


def _run_sweeps(
    options: Any, experiment: Experiment, space: Space, device: str | None, note: Callable[[str], None]
) -> list[Sweep]:
    """One sweep for each number of copies."""
    from mupscale.theory import sweep_limit

    with _bar(len(space.cells) * len(options.times), "cells") as tick, _memory_errors_in_words():
        return [
            sweep_limit(
                experiment,
                space,
                times=times,
                after=options.after,
                samples=options.samples,
                seeds=options.seeds,
                device=device,
                tick=tick,
                note=note,
            )
            for times in options.times
        ]


@may_write_nothing("--revealed")
def limit_grow_command(words: list[str]) -> int:
    """mupscale limit grow."""
    options = read_grow_options(words)
    from mupscale.theory import (
        Experiment,
        Stage,
        best_way,
        compare_ways_to_grow,
        limit_pictures,
        limit_study,
        list_ways,
    )

    base = Experiment(make_network(options), *make_batch(options), [Stage(options.steps, options.lr)])
    stages = list_ways(
        options.times, options.after, options.lr, options.rates, [0.0, *options.noises], options.outgoing
    )
    device, notes = choose_device(options), list[str]()
    gallery = limit_pictures.open_gallery(Path(options.out))
    widest = max(options.widths, default=None)
    shared: dict[str, Any] = {name: options[name] for name in ("samples", "seeds", "networks")}
    shared |= {"device": device, "dense": not options.revealed}
    pictured = 2 * (options.seeds + options.networks * len(options.widths))
    total = len(stages) * (1 if widest is None else 2) + pictured
    with _bar(total, "runs") as tick, _memory_errors_in_words():
        ways = compare_ways_to_grow(base, stages, width=widest, tick=tick, note=notes.append, **shared)
        comparisons = {
            f"{way.name}, {way.stage.lr / options.lr:g} × the rate": limit_study.compare_with_limit(
                Experiment(base.mlp, base.inputs, base.targets, [*base.stages, way.stage]),
                options.widths,
                tick=tick,
                note=limit_study.ignore,
                **shared,
            )
            for way in (best_way(ways, how) for how in ("copies", "fresh"))
            if way is not None
        }
    results = {
        "settings": settings_of(options),
        "ways": [way.to_json() for way in ways],
        "pictured": {name: comparison.to_json() for name, comparison in comparisons.items()},
    }
    if not comparisons:
        limit_study.save_results(gallery.folder / "results.json", results)
        raise Diverged(f"all {len(ways)} ways to grow have diverged; take smaller --rates, or a smaller --lr")
    limit_pictures.draw_losses(comparisons, gallery, "grow")
    limit_pictures.draw_errors(comparisons, gallery)
    print_ways(ways, options.lr, widest, comparisons)
    for note in notes:
        show(wrap_text(f"Note: {note}."))
    return _write_results(gallery.folder, results)


def _write_results(folder: Path, results: dict[str, Any]) -> int:
    from mupscale.theory import limit_study

    print_place("Results and pictures", limit_study.save_results(folder / "results.json", results).parent)
    return 0


@contextmanager
def _memory_errors_in_words() -> Iterator[None]:
    """What does not fit into memory becomes an error of one sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        raise MupscaleError(
            "this does not fit into memory: take smaller --widths or fewer --samples, or --revealed for wide networks"
        ) from None


@contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[[], None]]:
    """How much is done and how long it will take, where stderr is a terminal; elsewhere a line now and then."""
    if sys.stderr.isatty():
        installed("rich.progress")
    columns = ("wide bar", "count", what, "time", "left", "time left")
    display, done = open_display(columns, total, transient=True, lines="stderr"), 0

    def tick() -> None:
        nonlocal done
        done += 1
        display.update(done, f"{done} of {total} {what}")

    try:
        yield tick
    finally:
        display.close()
