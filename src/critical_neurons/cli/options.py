"""Options that several commands share, and functions that parse their texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from critical_neurons.core import budget
from critical_neurons.core.budget import Budget
from critical_neurons.core.distillation import Distillation
from critical_neurons.core.settings import Compensation, DistanceName, EffortName, Plain, help_of, setting
from critical_neurons.core.solver import Solver
from critical_neurons.core.workers import Workers
from critical_neurons.errors import InvalidFileError, InvalidSettingError

if TYPE_CHECKING:
    from torch import Tensor

    from critical_neurons import Plan, Scores
    from critical_neurons.removal.rows import Inputs


MOST_PER_CLASS = 100
"""Default number of inputs per class of a data set, for searching and refitting."""

ModelName = Annotated[
    str,
    typer.Argument(
        help="fc3, fc4, lenet5, vgg16, resnet20, package.module:factory, or an .onnx file.", metavar="MODEL"
    ),
]
DataName = Annotated[
    str,
    typer.Argument(
        help="A .npz or .safetensors with inputs (inputs.NAME for each of several) and labels, if any; or a "
        "data set: a folder or a Hugging Face id.",
        metavar="DATA",
    ),
]
DataOption = Annotated[str | None, typer.Option(help="Labelled data, as for score.")]
Weights = Annotated[Path | None, typer.Option(help="Trained weights: safetensors or a torch checkpoint.")]
FOLDER_HELP = "A new folder for the smaller model, its plan and its provenance."
Folder = Annotated[Path | None, typer.Option(help=FOLDER_HELP)]
SmallerFolder = Annotated[Path, typer.Argument(help="What prune or compress wrote with --save.", metavar="FOLDER")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Let --save replace what it wrote before.")]
InputShape = Annotated[str | None, typer.Option(help="Shape of one input, such as 3,32,32.")]
PerClass = Annotated[
    int | None, typer.Option(help="Inputs of every class, at random. Default: 1 of a data set, all of a file.")
]
Split = Annotated[str, typer.Option(help="Split of a data set.")]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help=help_of(Solver, "seed"))]
Units = Annotated[float | None, typer.Option(help=help_of(Budget, "units"))]
Params = Annotated[float | None, typer.Option(help=help_of(Budget, "params"))]
Macs = Annotated[float | None, typer.Option(help=help_of(Budget, "macs"))]
Latency = Annotated[
    float | None,
    typer.Option(help="Take at most this share of the measured time of one input, such as 0.5."),
]
MinUnits = Annotated[int, typer.Option(help="Units that stay in every layer.")]
RoundTo = Annotated[int, typer.Option(help="Keep a multiple of this many units per layer.")]
Keep = Annotated[list[str] | None, typer.Option(help="A layer that loses nothing; may be repeated.")]
COMPENSATE_HELP = (
    "What is refitted to compensate removed units: nothing, biases, or weights and biases by least squares; distil "
    "then trains all weights, without labels, to reproduce the original's outputs."
)
Compensate = Annotated[Compensation, typer.Option(help=COMPENSATE_HELP)]
Effort = Annotated[EffortName, typer.Option(help="How much work a search may do.")]
Distance = Annotated[
    DistanceName, typer.Option(help="How outputs are compared: divergence of class probabilities, or squares.")
]
TestData = Annotated[
    str | None, typer.Option(help="Labelled data for the comparison, which was used for nothing else.")
]
TestSplit = Annotated[
    str | None, typer.Option(help="Split of --test-data, test by default; without --test-data, of DATA.")
]
EXPORTS_HELP = "A file for the smaller network: .onnx, or .pt2 of torch.export. May be repeated."
Exports = Annotated[list[Path] | None, typer.Option(help=EXPORTS_HELP)]
Ignore = Annotated[list[str] | None, typer.Option(help="A layer that gets no scores; may be repeated.")]
NoOnnx = Annotated[bool, typer.Option("--no-onnx", help="Leave out onnxruntime and int8.")]
Scope = Annotated[budget.Scope, typer.Option(help=help_of(Budget, "scope"))]
Start = Annotated[str | None, typer.Option(help="First module to read and score; what comes before is run as it is.")]
Stop = Annotated[str | None, typer.Option(help="Last module to read and score; what follows is linearised.")]
Json = Annotated[bool, typer.Option("--json", help="Only JSON on standard output.")]


@dataclass(frozen=True, kw_only=True)
class DataForm(Plain):
    """How data is converted to the form that the model was trained on."""

    mean: str = setting("", "Subtracted from inputs: one number, or one per channel as 0.5,0.5,0.5.")
    std: str = setting("", "Inputs are divided by it: one number, or one per channel.")
    resize: int | None = setting(None, "Side of the square that images are resized to.")
    channels: int | None = setting(None, "1 or 3: images become grey or RGB.")

    def load(
        self,
        source: str,
        *,
        per_class: int | None = None,
        most_per_class: int | None = None,
        seed: int = 0,
        split: str = "train",
    ) -> tuple[Inputs, Tensor | None]:
        """Inputs and labels, by `io.data.load_batch`."""
        from critical_neurons.io.data import Look, load_batch

        mean, std = read_numbers("--mean", self.mean), read_numbers("--std", self.std)
        look = Look(self.channels, self.resize, mean, std)
        return load_batch(
            source, per_class=per_class, most_per_class=most_per_class, seed=seed, split=split, look=look
        )

    def load_test(
        self, data: str, test_data: str | None, test_split: str | None
    ) -> tuple[Inputs, Tensor | None] | None:
        """The data of --test-data, or of another split of DATA, if either is given."""
        from critical_neurons.io.data import is_file

        source = data if test_data is None else test_data
        if test_split is not None and is_file(source):
            raise InvalidSettingError(
                f"--test-split: {source} is a file, which has no splits. Give --test-data alone."
            )
        if test_data is None and test_split is None:
            return None
        return self.load(source, split=test_split or "test")


@dataclass(frozen=True, kw_only=True)
class WorkersChoice(Plain):
    """Where independent tasks run."""

    jobs: int = setting(1, "Parallel processes, one thread each. Results are those of one thread, for any number.")
    backend: Literal["local", "dask"] = setting("local", "Processes of this machine, or workers of a Dask cluster.")
    scheduler: str | None = setting(
        None, "Address of the cluster's scheduler, such as tcp://host:8786, with --backend dask."
    )

    def read(self) -> Workers:
        if (self.backend == "dask") != (self.scheduler is not None):
            raise InvalidSettingError(
                "--scheduler: the address of a Dask scheduler goes with --backend dask, and that needs it, as "
                "--backend dask --scheduler tcp://host:8786."
            )
        return Workers(self.jobs, self.scheduler)


def read_numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InvalidSettingError(f"{option}: numbers with commas between them, got {text!r}.") from None


def read_sizes(option: str, text: str, example: str) -> tuple[int, ...]:
    sizes = read_numbers(option, text)
    if not sizes or any(size < 1 or not size.is_integer() for size in sizes):
        raise InvalidSettingError(f"{option}: whole numbers above zero, such as {example}; got {text!r}.")
    return tuple(int(size) for size in sizes)


def read_pairs(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parse name=value; numbers, true and false are converted."""
    pairs: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidSettingError(f"{option}: name=value, got {text!r}.")
        if name in pairs:
            raise InvalidSettingError(f"{option}: {name} is given twice.")
        try:
            pairs[name] = json.loads(value)
        except ValueError:
            pairs[name] = value
    return pairs


def read_incumbent(path: Path) -> Plan | Scores:
    """A plan or scores, depending on the file."""
    from critical_neurons.core.documents import find_format
    from critical_neurons.core.plan import Plan
    from critical_neurons.core.scores import Scores

    kinds: dict[str | None, type[Plan | Scores]] = {kind.FORMAT: kind for kind in (Plan, Scores)}
    found = find_format(path)
    if found not in kinds:
        raise InvalidFileError(
            f"{path}: neither a plan nor scores. Accepted: what score --output or prune --plan wrote."
        )
    return kinds[found].load(path)


def read_threshold(text: str | None) -> float | Literal["mean"] | None:
    if text is None:
        return None
    if text == "mean":
        return "mean"
    try:
        return float(text)
    except ValueError:
        raise InvalidSettingError(f"--threshold: a number or mean, got {text!r}.") from None


def join_compensation(
    compensate: Compensation | None, distillation: Distillation | None
) -> Compensation | Distillation | None:
    if distillation is None:
        return compensate
    if compensate != "distil":
        raise InvalidSettingError("--distil-*: settings of distillation. Add --compensate distil or leave them out.")
    return distillation


def find_model_file(model: str) -> Path | None:
    """The file of the model, if it is not a name."""
    return Path(model) if model.endswith(".onnx") else None


def find_shape(inputs: Inputs) -> tuple[int, ...] | None:
    """The shape of one input; None if there are several."""
    from torch import Tensor

    return tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else None


def find_given_shape(inputs: Inputs | None, input_shape: str | None) -> tuple[int, ...] | None:
    """The shape of one input, if given by data or --input-shape."""
    if inputs is not None:
        return find_shape(inputs)
    return None if input_shape is None else read_sizes("--input-shape", input_shape, "3,32,32")


def choose_example(model: str, inputs: Inputs | None, input_shape: str | None) -> Inputs:
    """Example inputs: the data, or random ones of the shape given, of the built-in network or of the file."""
    import torch

    from critical_neurons.io.builtin_models import MODELS
    from critical_neurons.io.onnx_import import read_input_shape

    if inputs is not None:
        return inputs
    shape, file = find_given_shape(inputs, input_shape), find_model_file(model)
    if shape is None and model in MODELS:
        shape = MODELS[model].input_shape
    if shape is None and file is not None:
        shape = read_input_shape(file)
    if shape is None:
        raise InvalidSettingError(f"{model}: say what an input looks like, with --input-shape 3,32,32 or --data.")
    try:
        return torch.rand((2, *shape), generator=torch.Generator().manual_seed(0))
    except (RuntimeError, TypeError) as error:
        raise InvalidSettingError(f"--input-shape: {input_shape} is more than the memory holds.") from error
