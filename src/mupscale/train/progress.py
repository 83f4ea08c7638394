"""What a person sees of a run: a bar with loss, throughput and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any, Protocol

from mupscale.system import open_display


class Progress(Protocol):
    """Told of every record of metrics, and of what else happens."""

    def update(self, record: dict[str, Any], speed: float) -> None:
        """A record of metrics, and units (samples, tokens) a second since the last one."""

    def note(self, text: str) -> None:
        """Something that happens once."""

    def close(self) -> None:
        """The end."""


def make_progress(steps: int, unit: str, *, visible: bool) -> Progress:
    """The bar where stderr is a terminal; nothing at all in processes that do not print.

    >>> progress = make_progress(100, "samples", visible=False)
    >>> progress.update({"kind": "train", "step": 1, "loss": 2.3}, speed=1e4)
    >>> progress.close()
    """
    return Metrics(steps, unit) if visible else Silence()


class Silence:
    """No output."""

    def update(self, record: dict[str, Any], speed: float) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Metrics:
    """Records of metrics on a bar or in lines; evaluations stay, above the bar or as lines of their own."""

    def __init__(self, steps: int, unit: str) -> None:
        self.steps, self.unit = steps, unit
        columns = ("wide bar", "count", "{task.fields[shown]}", "time", "left", "time left")
        self.display = open_display(columns, steps, lines="stdout", first_line_at_once=True, shown="")

    def update(self, record: dict[str, Any], speed: float) -> None:
        """The bar's new state, or a line if the last one is some time ago."""
        step, shown = record["step"], f"{describe_record(record)}{_speed(speed, self.unit)}"
        line = f"step {step}/{self.steps}  {shown}"
        if record["kind"] == "train":
            self.display.update(step, line, last=step >= self.steps, shown=shown)
        else:
            self.display.note(f"step {step}  {describe_record(record)}", line)

    def note(self, text: str) -> None:
        """A line."""
        self.display.note(text)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self.display.close()


def describe_record(record: dict[str, Any]) -> str:
    """A record in few words."""
    if record["kind"] == "eval":
        accuracy = record.get("accuracy")
        return f"held-out loss {record['loss']:.4f}" + ("" if accuracy is None else f", accuracy {accuracy:.1%}")
    return f"loss {record['loss']:.4f}"


def _speed(speed: float, unit: str) -> str:
    if speed <= 0:
        return ""
    scale, prefix = next(((s, p) for s, p in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if speed >= s), (1.0, ""))
    return "  " + " ".join(filter(None, (f"{speed / scale:.3g}", prefix, f"{unit}/s")))
