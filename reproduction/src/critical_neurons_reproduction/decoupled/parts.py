"""Parts: a sequential network split before every convolution, each part with an auxiliary head (a classifier)."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from critical_neurons.errors import InvalidInputError, InvalidSettingError, UnreadableModelError

SHRINK = 4
"""Factor by which a head's first pooling reduces height and width."""

LEAST_SIDE = 2
"""Height and width after a head's second pooling."""

HIDDEN = 128
"""Units of a head's hidden layer."""

HIDDEN_PER_CHANNEL = 4
"""Units of the hidden layer per input channel, in the authors' code."""


@dataclass(frozen=True, eq=False)
class DecoupledPart:
    """Consecutive modules of the network (the body, with their names there) and an auxiliary head. The last part has
    an empty head: it ends with the network's own classifier."""

    body: nn.Sequential
    head: nn.Sequential

    @property
    def name(self) -> str:
        """The name of its convolution."""
        return next(name for name, module in self.body.named_children() if isinstance(module, nn.Conv2d))

    @property
    def network(self) -> nn.Sequential:
        """Body and head as one network; the modules are shared, not copied."""
        return nn.Sequential(OrderedDict(body=self.body, head=self.head))


@dataclass(frozen=True, eq=False)
class Decoupled:
    """The network and its parts, in order. They share its modules: training a part trains the network."""

    model: nn.Sequential
    parts: tuple[DecoupledPart, ...]


def decouple(model: nn.Sequential, example: Tensor, *, hidden: int | None = HIDDEN, seed: int = 0) -> Decoupled:
    """A copy of the network in parts: each convolution with all modules up to the next one.

    `example` is a batch of inputs. `hidden` is the number of units of a head's hidden layer; None means four times
    its input channels, as in the authors' code. `seed` initialises the heads' weights.
    """
    if hidden is not None and (isinstance(hidden, bool) or not isinstance(hidden, int) or hidden < 1):
        raise InvalidSettingError(f"hidden: found {hidden!r}. Accepted: a whole number of at least 1.")
    whole = copy.deepcopy(_check_sequential(model))
    bodies = _cut(whole)
    *maps, logits = _run_bodies(bodies, example)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = [build_head(tuple(values.shape[1:]), logits.shape[1], hidden=hidden) for values in maps]
    weight = next(whole.parameters())
    pairs = zip(bodies, [*heads, nn.Sequential()], strict=True)
    return Decoupled(whole, tuple(DecoupledPart(body, head.to(weight)) for body, head in pairs))


def build_head(shape: tuple[int, ...], classes: int, *, hidden: int | None = HIDDEN) -> nn.Sequential:
    """Average pooling, a 1x1 convolution with batch norm and ReLU, average pooling, a hidden layer with ReLU, logits.

    `shape` (channels, height, width) is that of its input. A pooling that would change nothing is left out.
    """
    if len(shape) != 3:
        raise InvalidInputError(f"shape: found {shape}. Accepted: that of feature maps, (channels, height, width).")
    channels, *sides = shape
    width = HIDDEN_PER_CHANNEL * channels if hidden is None else hidden
    shrunk = [max(1, side // SHRINK) for side in sides]
    last = [min(LEAST_SIDE, side) for side in shrunk]
    return nn.Sequential(
        *_pool(sides, shrunk),
        nn.Conv2d(channels, channels, 1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        *_pool(shrunk, last),
        nn.Flatten(),
        nn.Linear(channels * last[0] * last[1], width),
        nn.ReLU(),
        nn.Linear(width, classes),
    )


def _pool(before: list[int], after: list[int]) -> list[nn.Module]:
    return [] if before == after else [nn.AdaptiveAvgPool2d((after[0], after[1]))]


def _check_sequential(model: nn.Sequential) -> nn.Sequential:
    if type(model) is not nn.Sequential:
        raise UnreadableModelError(
            f"model: found {type(model).__name__}. Accepted: one nn.Sequential of layers, such as vgg16 and lenet5."
        )
    seen: set[nn.Module] = set()
    for name, module in model._modules.items():  # named_children skips repeated modules
        inner = [] if module is None else [*module.modules()][1:]
        if any(isinstance(each, nn.Conv2d) for each in inner):
            raise UnreadableModelError(
                f"{name}: a convolution inside {type(module).__name__}. Accepted: convolutions as direct children "
                "of the nn.Sequential. Put these layers there one by one."
            )
        if module in seen and any(True for _ in module.parameters()):
            raise UnreadableModelError(f"{name}: a layer used twice cannot belong to two parts.")
        seen.add(module)
    if not any(isinstance(module, nn.Conv2d) for module in model):
        raise UnreadableModelError("model: no convolution to split at. Score it as a whole.")
    return model


def _cut(model: nn.Sequential) -> list[nn.Sequential]:
    """Split before every convolution but the first."""
    bodies: list[OrderedDict[str, nn.Module]] = [OrderedDict()]
    for name, module in model._modules.items():
        assert module is not None
        if isinstance(module, nn.Conv2d) and any(isinstance(each, nn.Conv2d) for each in bodies[-1].values()):
            bodies.append(OrderedDict())
        bodies[-1][name] = module
    return [nn.Sequential(body) for body in bodies]


def _run_bodies(bodies: list[nn.Sequential], example: Tensor) -> list[Tensor]:
    """The output of every part for the first example."""
    values, outputs = example[:1].to(next(bodies[0].parameters())), []
    with torch.no_grad():
        for body in copy.deepcopy(bodies):
            try:
                values = body.eval()(values)
            except RuntimeError as error:
                raise InvalidInputError(
                    f"example: the model does not run on inputs of shape {tuple(example.shape)}: "
                    f"{str(error).strip().splitlines()[0]}"
                ) from error
            outputs.append(values)
    if values.ndim != 2:
        raise InvalidInputError(f"model: it returns shape {tuple(values.shape)}. Accepted: logits (batch, classes).")
    return outputs
