"""Flow: which layers' outputs every layer reads, whatever happens to them on the way.

Labels say which channels are read, but end where channels must stay. The flow goes on, so that skip connections of
such channels are known as well. It goes by whole tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from critical_neurons.core.structure import KeptStream


class Flow:
    """`reads` has the layers that each layer reads."""

    def __init__(self) -> None:
        self.reads: dict[str, set[str]] = {}
        self._ends: list[frozenset[str]] = []
        self._sources = WeakTensorKeyDictionary()

    def follow(
        self, given: Iterable[Tensor], made: Iterable[Tensor], layers: Collection[str], *, writes: bool = False
    ) -> None:
        """A call made some tensors from others, or wrote into them, with the weights of these layers if any."""
        known = {each for each in map(self._find, given) if each}
        sources = known.pop() if len(known) == 1 else frozenset[str]().union(*known)
        for layer in layers:
            self.reads.setdefault(layer, set()).update(sources - {layer})
        if not (found := frozenset(layers) or sources):
            return
        for values in made:
            self._sources[values] = found
            if writes and values._base is not None:
                self._sources[values._base] = self._find(values._base) | found

    def end(self, output: Tensor) -> None:
        """The model returns it."""
        self._ends.append(self._find(output))

    def list_streams(self, layers: Iterable[str]) -> list[KeptStream]:
        """What these layers write; those that are read together form one stream."""
        streams: list[tuple[list[str], set[str | int]]] = []
        for layer in layers:
            readers: set[str | int] = {name for name, read in self.reads.items() if layer in read}
            readers |= {place for place, read in enumerate(self._ends) if layer in read}
            joined = [stream for stream in streams if stream[1] & readers]
            streams = [stream for stream in streams if not stream[1] & readers]
            writers = [name for stream in joined for name in stream[0]]
            streams.append(([*writers, layer], readers.union(*(stream[1] for stream in joined))))
        return [
            KeptStream(tuple(writers), tuple(name for name in self.reads if name in readers))
            for writers, readers in streams
        ]

    def _find(self, values: Tensor) -> frozenset[str]:
        found: frozenset[str] | None = self._sources.get(values)  # type: ignore[no-untyped-call]
        return found or frozenset()
