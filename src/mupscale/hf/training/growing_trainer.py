"""Growth in the middle of a run of transformers' Trainer: model, optimizer and scheduler, where they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from mupscale.core import RuleSet
from mupscale.growth import Copies, Deepen, Operator, SignalNoise, replica_in_words, upscale_untried
from mupscale.hf.describe import (
    AskedGrowth,
    Config,
    Times,
    check_depth,
    check_drawn,
    family_of_config,
    names_in_model,
    quiet_transformers,
    settle_growth,
)
from mupscale.hf.files import GrowthStep, Record, count_from_first, open_source, sizes_in_words
from mupscale.hf.training.deepened_model import deepen_in_memory, model_like
from mupscale.hf.training.invariant_clipping import InvariantClipping, find_in_charge, say_in_log
from mupscale.hf.training.model_parameters import match_plan, plan_for_model, shapes_of
from mupscale.hf.training.trainer import Clip
from mupscale.optim import FROM_GROUP, follow_rules, widen_scheduler
from mupscale.system import (
    MupscaleError,
    Must,
    NotNegative,
    ReplicaWarning,
    UncheckedPlan,
    checks_arguments,
    read_json,
    warn,
)

_STEPS = Must(
    "the number of steps after which the model grows, 1 or more. To grow it before training, use mupscale.hf.upscale, "
    "and train the wide checkpoint",
    lambda at: at >= 1,
)


@checks_arguments
class GrowTrainerCallback(InvariantClipping):
    """`Trainer(…, callbacks=[GrowTrainerCallback(at=500, times=2)])`: the model grows after this many steps.

    times, or hidden, ffn, heads and kv: how wide it becomes; grow, noise, exact, seed: how, all as in `hf.upscale`, by
    fresh units if nothing is said. layers: how many it gets, and deepen: what new ones are; with layers alone the width
    stays. lr: the learning rate at the step of growth, where the schedule may have fallen far below learning_rate, in
    the small model's units; the schedule goes on from it, with all its rates in that ratio. scale_lr, in its place: by
    what all rates are multiplied from then on, such as 0.5. rules: by which weight decay grows.
    The small model is saved as narrow-checkpoint-STEP, with its optimizer's state, which save_total_limit does not
    count; the grown one as checkpoint-STEP with a mupscale.json.
    The Trainer keeps its model object, which has the grown weights from then on; clipping (max_grad_norm) is then by
    the norm that the small model's gradient would have, and load_best_model_at_end chooses among checkpoints of the
    grown model. A Trainer may have several such callbacks, each for a step of its own. After a stop, make the same
    Trainer with the same callbacks, and go on with `trainer.train(resume_from_checkpoint=callback.resume(trainer))`,
    where callback is any of them.

    >>> GrowTrainerCallback(at=500, times=2, scale_lr=0.5).at
    500
    """

    def __init__(
        self,
        at: Annotated[int, _STEPS],
        *,
        times: int | str | Mapping[str, int] | Times | None = None,
        hidden: int | None = None,
        ffn: int | None = None,
        heads: int | None = None,
        kv: int | None = None,
        layers: int | None = None,
        deepen: Deepen = "identity",
        grow: Operator | None = None,
        noise: float | None = None,
        exact: bool = False,
        lr: NotNegative | None = None,
        scale_lr: float = 1.0,
        seed: int = 0,
        rules: RuleSet | None = None,
    ) -> None:
        super().__init__()
        if not (scale_lr > 0 and math.isfinite(scale_lr)) or (lr is not None and scale_lr != 1):
            raise MupscaleError(
                f"scale_lr= is a positive factor for the learning rates, instead of lr=, not {scale_lr!r} with "
                f"lr={lr!r}"
            )
        self.at, self.times, self.grow, self.noise, self.exact, self.seed = at, times, grow, noise, exact, seed
        self.lr, self.scale_lr = lr, scale_lr
        self.sizes = {"hidden": hidden, "ffn": ffn, "heads": heads, "kv": kv}
        self.layers, self.deepen, self.rules = layers, deepen, rules or RuleSet()
        self._loading: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have a checkpoint of the grown model met by a sentence, and not by a list of shapes, where it is loaded."""
        super().on_init_end(args, state, control, **kwargs)
        if kwargs.get("model") is not None and self not in (growths := _GROWTHS.setdefault(kwargs["model"], [])):
            growths.append(self)
        if self._loading is None and kwargs.get("model") is not None:
            self._loading = kwargs["model"].register_load_state_dict_pre_hook(self._check_loaded)

    def _check_loaded(self, model: nn.Module, tensors: dict[str, Any], *rest: Any) -> None:
        """Refuse weights of another size, or of another number of layers, than the model has before its growth."""
        own, names = model.state_dict(), names_in_model(model, tensors)
        loaded = tensors.keys() if names is None else {one.names[0] for one in names.values()}
        differs = any(own[name].shape != tensor.shape for name, tensor in tensors.items() if name in own)
        differs |= self.layers is not None and not loaded <= own.keys()
        if self.plan is None and differs:
            raise MupscaleError(
                f"this checkpoint holds the model that grew after step {self.at}, but this Trainer's model has not "
                "grown. Continue with trainer.train(resume_from_checkpoint=callback.resume(trainer))"
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse now what could not grow later."""
        if self._loading is not None:  # whatever was to be loaded has been
            self._loading.remove()
            self._loading = None
        if args.world_size > 1 or args.deepspeed or args.torch_compile:
            raise MupscaleError(
                "GrowTrainerCallback grows a model in one process, uncompiled. With several processes, stop at this "
                "step, widen the checkpoint with mupscale upscale --optimizer, and continue from it"
            )
        if self.plan is not None:  # resumed after the growth
            self.switch_off_theirs(args)
        elif state.global_step < self.at:
            if not self._comes_later(kwargs["model"]):
                asked = self._asked(kwargs["model"])
                if asked.is_replica and not self.exact:
                    warn(replica_in_words(), ReplicaWarning)
            if state.max_steps < self.at:
                warn(
                    f"the model will not grow: GrowTrainerCallback(at={self.at}) waits for step {self.at}, but this "
                    f"run ends after step {state.max_steps}. Give an earlier at=, or train longer"
                )
        else:
            raise MupscaleError(
                f"this run continues from step {state.global_step}, but its model grew after step {self.at}. Continue "
                "with trainer.train(resume_from_checkpoint=callback.resume(trainer))"
            )

    def _comes_later(self, model: nn.Module) -> bool:
        """Whether the model has to grow once more before this growth, so that it cannot be judged yet."""
        return any(one.at < self.at and one.plan is None for one in growths_of(model))

    def resume(self, trainer: Any) -> str | None:
        """The newest whole checkpoint of a Trainer's folder, for whose size its model is made; None if there is none.

        What was killed while it was written lacks its last file, and is passed over.
        """
        found = last_checkpoint(Path(trainer.args.output_dir))
        if found is None:
            return None
        step, folder = found
        callbacks = trainer.callback_handler.callbacks
        clip = next((one for one in callbacks if isinstance(one, Clip)), None)
        growths = {self, *(one for one in callbacks if isinstance(one, GrowTrainerCallback))}
        for growth in sorted(growths, key=lambda one: one.at):
            if step >= growth.at and growth.plan is None:
                if clip is not None and find_in_charge(trainer.model) is None:
                    clip.begin(trainer.model)
                growth._grow(trainer.model, trainer.create_optimizer(), None)  # its values are the checkpoint's soon
        _load_renamed(trainer.model, folder)
        return str(folder)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Grow, if this was the step."""
        if state.global_step != self.at:
            return control
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        self._save_narrow(Path(args.output_dir) / f"narrow-checkpoint-{self.at}", model, inner)
        self._warn_of_the_same_rate(inner)
        before, rates = _size(model), _told_rates(inner)
        self._grow(model, inner, kwargs["lr_scheduler"])
        told = ", ".join(
            f"{name} {a:,} → {_size(model)[name]:,}" for name, a in before.items() if a != _size(model)[name]
        )
        say_in_log(state, f"the model has grown: {told}; learning rate {rates} → {_told_rates(inner)}", **_size(model))
        self.switch_off_theirs(args)
        # the best so far is a small model, whose weights could not be loaded at the end
        state.best_metric = state.best_model_checkpoint = state.best_global_step = None
        control.should_save = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the arguments as they were, and the best model whole where it was loaded."""
        super().on_train_end(args, state, control, **kwargs)
        if args.load_best_model_at_end and state.best_model_checkpoint and self.is_in_charge(kwargs["model"]):
            _load_renamed(kwargs["model"], Path(state.best_model_checkpoint))

    def _save_narrow(self, folder: Path, model: Any, optimizer: Optimizer) -> None:
        """The model before the growths of this step; checkpoint-… would count for the Trainer's rotation."""
        earlier = find_in_charge(model)
        if isinstance(earlier, GrowTrainerCallback) and earlier.at == self.at:
            return
        model.save_pretrained(folder)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    def _warn_of_the_same_rate(self, optimizer: Optimizer) -> None:
        """lr= is easily taken for a rate that the schedule is to begin with."""
        if self.lr is not None and all(math.isclose(self.lr, rate, rel_tol=1e-3) for rate in _rates(optimizer)):
            warn(
                f"lr={self.lr:g} changes nothing: the schedule has that rate after step {self.at}. For half of the "
                f"rates from here on, give lr={self.lr / 2:g}"
            )

    def _asked(self, model: nn.Module) -> AskedGrowth:
        config = model.config.to_dict()  # type: ignore[union-attr, operator]
        if self.layers is not None:
            is_wider = self.times is not None or self.grow is not None or any(self.sizes.values())
            check_depth(config, self.deepen, self.layers, shapes_of(model), "the model")
            if not is_wider:
                return settle_growth(config, times=1, exact=True)
        how: dict[str, Any] = {"grow": self.grow, "noise": self.noise, "exact": self.exact}
        return settle_growth(config, times=self.times, sizes=self.sizes, **how)

    def _grow(self, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
        """Grow all three in place, since the Trainer's loop holds on to them."""
        follow_rules(optimizer, self.rules)
        asked, config = self._asked(model), model.config.to_dict()  # type: ignore[union-attr, operator]
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        config |= {"architectures": [type(model).__name__], "dtype": dtype}  # a config has them once it was saved
        earlier, lr = find_in_charge(model), self._new_rate(optimizer)
        record = (earlier and earlier.record) or Record(config)
        grown, grown_optimizer, is_wider = nn.Module.__new__(type(model)), optimizer, asked.times != Times()
        grown.__dict__.update(model.__dict__)
        if is_wider or self.layers is None:
            grown, grown_optimizer = self._wider(grown, optimizer, asked, record, lr if self.layers is None else None)
            record = self._record_width(record, config, asked)
        if self.layers is not None:
            step = GrowthStep(Times(), seed=self.seed, layers=self.layers, deepen=self.deepen)
            from_group = [group.get(FROM_GROUP) for group in grown_optimizer.param_groups]
            grown, grown_optimizer = deepen_in_memory(
                grown, grown_optimizer, step, record.first_config, record.times, lr
            )
            if is_wider:  # schedulers go by the groups of the first optimizer
                for group in grown_optimizer.param_groups:
                    group[FROM_GROUP] = from_group[group[FROM_GROUP]]
            record = record.then(step)
        widened = None if scheduler is None else widen_scheduler(scheduler, grown_optimizer)
        model.__dict__.clear()
        model.__dict__.update(grown.__dict__)
        optimizer.param_groups, optimizer.state = grown_optimizer.param_groups, grown_optimizer.state
        if widened is not None:
            kept = ("optimizer", "step")  # the scheduler counts the steps of the optimizer that it knows
            scheduler.__dict__.update({name: value for name, value in vars(widened).items() if name not in kept})
        self.max_norm = None if earlier is None else earlier.max_norm
        self.take_charge(model, plan_for_model(model, record), record)

    def _new_rate(self, optimizer: Optimizer) -> float | None:
        """The rate at the step of growth, in the small model's units; None where it stays."""
        if self.scale_lr == 1:
            return self.lr
        rates = _rates(optimizer)
        if not all(math.isclose(rate, rates[0], rel_tol=1e-6) for rate in rates):
            raise MupscaleError(
                f"scale_lr= takes parameter groups of one learning rate, and after step {self.at} they have "
                f"{', '.join(f'{rate:g}' for rate in sorted(set(rates)))}: give lr="
            )
        return rates[0] * self.scale_lr

    def _record_width(self, record: Record, config: Config, asked: AskedGrowth) -> Record:
        """The record after a growth in width; what is drawn counts from the first model, where this one grew before."""
        from_first, operator = bool(record.growths) and asked.needs_initial, asked.operator
        if isinstance(operator, Copies) and isinstance(operator.noise, SignalNoise):
            operator = replace(operator, noise=operator.noise.effective or 0.0)
        step = GrowthStep(asked.times, operator, self.seed, from_first=from_first)
        plan = family_of_config(config).plan(asked.times, initial=not operator.needs_multiples)
        return record.then(step, count_from_first(record, plan))

    def _wider(
        self, narrow: nn.Module, optimizer: Optimizer, asked: AskedGrowth, record: Record, lr: float | None
    ) -> tuple[nn.Module, Optimizer]:
        config = {**narrow.config.to_dict(), "architectures": [type(narrow).__name__]}  # type: ignore[union-attr, operator]
        family = family_of_config(config)
        planned = family.plan(asked.times)
        plan = count_from_first(record, match_plan(narrow, planned))
        check_drawn(plan, asked.operator)
        wide = model_like(narrow, family.wide_config(asked.times))
        _, grown = upscale_untried(narrow, wide, plan, optimizer, grow=asked.operator, lr=lr, seed=self.seed)
        assert grown is not None
        is_lossless = asked.fresh is not None and asked.fresh.lossless
        reasons = family.obstacles(asked.times, plan) if is_lossless else []
        if reasons:
            warn(f"the growth is not lossless: {'; '.join(reasons)}")
        elif not planned.checked:
            warn(self._untried(family.model_type), UncheckedPlan)
        return wide, grown

    def _untried(self, model_type: str) -> str:
        return (
            f"this growth has not been tried: no miniature of '{model_type}' could be run. Compare "
            f"the two models, in the Trainer's folder: mupscale verify narrow-checkpoint-{self.at} checkpoint-{self.at}"
        )


_GROWTHS: WeakKeyDictionary[nn.Module, list[GrowTrainerCallback]] = WeakKeyDictionary()
"""The growths that a Trainer's model was to have, when the Trainer was made."""


def growths_of(model: nn.Module | None) -> list[GrowTrainerCallback]:
    """The growths that a Trainer's model is to have, as far as the Trainer has met them."""
    return [] if model is None else _GROWTHS.get(model, [])


def _load_renamed(model: Any, folder: Path) -> None:
    """Load a checkpoint some of whose tensors have other names, or are stacked otherwise, than the model's.

    The Trainer loads by the model's names alone, and would leave such parameters as they are: GPT-NeoX's readout, or a
    mixture's experts.
    """
    if open_source(folder).tensors.keys() <= model.state_dict().keys():
        return
    with quiet_transformers():
        whole, told = type(model).from_pretrained(folder, dtype=model.dtype, output_loading_info=True)
    if missing := sorted(told["missing_keys"]):
        raise MupscaleError(f"{folder} lacks '{missing[0]}', so the run cannot continue from it. Remove that folder")
    model.load_state_dict(whole.state_dict())


def _size(model: Any) -> dict[str, int]:
    """What a line in the log says of a model's size."""
    return {**sizes_in_words(model.config.to_dict()), "parameters": sum(p.numel() for p in model.parameters())}


def _told_rates(optimizer: Optimizer) -> str:
    """The smallest and the largest learning rate of its groups."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return f"{max(rates):.3g}" if min(rates) == max(rates) else f"{min(rates):.3g} to {max(rates):.3g}"


def _rates(optimizer: Optimizer) -> list[float]:
    """The learning rates of its groups, in the small model's units."""
    return [float(group["lr"]) / group.get("lr_factor", 1.0) for group in optimizer.param_groups]


def last_checkpoint(folder: Path) -> tuple[int, Path] | None:
    """The newest checkpoint in a Trainer's folder that is whole, and its step: its state is the last that is written.

    >>> last_checkpoint(Path("nowhere")) is None
    True
    """
    found = {int(path.name[11:]): path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal()}
    for step in sorted(found, reverse=True):
        try:
            state = read_json(found[step] / "trainer_state.json")
        except (OSError, MupscaleError):
            continue
        if isinstance(state, dict) and state.get("global_step") == step:
            return step, found[step]
    return None
