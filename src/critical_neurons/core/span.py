"""Span: the part of a model that is read and scored. The rest is run as it is."""

from __future__ import annotations

from dataclasses import dataclass

from critical_neurons.errors import InvalidSettingError


@dataclass(frozen=True)
class Span:
    """From the module called `start` to the one called `stop`, both included; None: from the input, to the logits."""

    start: str | None = None
    stop: str | None = None

    def __post_init__(self) -> None:
        for end, name in (("start", self.start), ("stop", self.stop)):
            if name is not None and (not isinstance(name, str) or not name):
                raise InvalidSettingError(
                    f"{end}: found {name!r}. Accepted: the name of a module as in model.named_modules(), or None."
                )

    @property
    def whole(self) -> bool:
        return self.start is None and self.stop is None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for users of the scores."""
        notes = []
        if self.start is not None:
            notes.append(f"what comes before {self.start} is run as it is, and no part of the program")
        if self.stop is not None:
            notes.append(
                f"what follows {self.stop} is expanded to first order at the data points: nothing is certified about "
                "the whole network's loss"
            )
        return tuple(notes)


WHOLE = Span()
"""The whole model."""
