"""Models: an nn.Module from a name and a file of weights, or from an ONNX file."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import re
import sys
import traceback
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from critical_neurons.core.documents import check_file, find_free_memory
from critical_neurons.errors import InvalidFileError, InvalidSettingError, first_line
from critical_neurons.io.builtin_models import MODELS
from critical_neurons.io.onnx_import import import_onnx

WEIGHTS_INSIDE = ("state_dict", "model_state_dict", "model")
"""Keys under which checkpoints store the weights."""

WRAPPERS = ("module.", "_orig_mod.", "model.")
"""Prefixes that DataParallel, torch.compile and training frameworks add to parameter names."""

LISTED = 6
"""Most names listed in a message."""


ONNX = ".onnx"


def load_model(
    spec: str, weights: str | os.PathLike[str] | None = None, input_shape: tuple[int, ...] | None = None
) -> nn.Module:
    """A built-in network by name, what `package.module:factory` returns, or the network in an ONNX file; on the CPU
    in evaluation mode. `input_shape`: of one input, for ONNX files that leave it open."""
    if spec.endswith(ONNX):
        if weights is not None:
            raise InvalidSettingError(f"--weights: {spec} holds its weights. Leave out {weights}.")
        return import_onnx(spec, input_shape)
    builtin = MODELS.get(spec)
    model = builtin.factory() if builtin else _call_factory(spec)
    if weights is not None:
        _fill(model, _read_weights(Path(weights)), weights)
    return model.eval()


def _call_factory(spec: str) -> nn.Module:
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        raise InvalidSettingError(
            f"model: no built-in network is called {spec!r}. Give one of {', '.join(MODELS)}, or "
            "package.module:factory, a function without arguments that returns an nn.Module; or an .onnx file."
        )
    with _current_directory_importable():
        module = _import(spec, module_name)
        try:
            factory = getattr(module, name)
        except AttributeError:
            raise InvalidSettingError(f"{spec}: {module_name} has no {name}. {_offer(module)}") from None
        if isinstance(factory, nn.Module):
            return factory
        if not callable(factory):
            raise InvalidSettingError(f"{spec}: is a {type(factory).__name__}, not a function that returns a model.")
        model = _attempt(f"{spec}: calling it", factory)
    if not isinstance(model, nn.Module):
        raise InvalidSettingError(f"{spec}: returned a {type(model).__name__}, expected a torch.nn.Module.")
    return model


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    """Make the current folder importable, as with `python -m`, but only here, so that a folder called `datasets` does
    not hide a package later."""
    directory = os.getcwd()
    sys.path.insert(0, directory)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if directory in sys.path:
            sys.path.remove(directory)


def _import(spec: str, module_name: str) -> Any:
    try:
        return _attempt(f"{spec}: importing {module_name}", lambda: importlib.import_module(module_name))
    except InvalidSettingError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{module_name}.".startswith(f"{cause.name}."):
            raise InvalidSettingError(
                f"{spec}: no module is called {cause.name}. Looked in {os.getcwd()} and in the installed packages."
            ) from None
        raise


def _attempt(what: str, action: Callable[[], Any]) -> Any:
    """Run the user's code; an exception becomes one sentence with its place."""
    try:
        return action()
    except (Exception, SystemExit) as error:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if "<frozen" not in each.filename]
        within = len(frames) > 1 and not isinstance(error, SyntaxError)  # its message has the place
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if within else ""
        raise InvalidSettingError(f"{what} raised {type(error).__name__}: {error}{place}") from error


def _offer(module: Any) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]
    return f"It has {_listed(names)}." if names else "It defines no functions or classes."


def _read_weights(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        raise InvalidFileError(f"{path}: is a folder. Give the file of weights.")
    if not path.is_file():
        raise InvalidFileError(f"{path}: no such file of weights.")
    check_file(path)
    content = _read_safetensors(path) if path.suffix == ".safetensors" else read_checkpoint(path)
    inside = next((content[key] for key in WEIGHTS_INSIDE if isinstance(content.get(key), Mapping)), content)
    weights = {name: value for name, value in inside.items() if isinstance(value, Tensor)}
    if not weights:
        raise InvalidFileError(
            f"{path}: holds no weights by name. Found the keys {_listed(list(inside))}; expected a state dict, or a "
            f"dict with one under {', '.join(WEIGHTS_INSIDE)}."
        )
    return weights


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    try:
        content: Mapping[str, Any] = load_file(path, device="cpu")
    except Exception as error:  # a damaged header makes it raise nearly anything
        raise InvalidFileError(f"{path}: cannot be read as safetensors ({first_line(error)}).") from error
    return content


def read_checkpoint(path: Path) -> Mapping[str, Any]:
    """Read a file of `torch.save` without running any code from it."""
    check_file(path)
    source = _open_checkpoint(path)
    try:
        content = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL ([\w.]+)|class (\S+)", str(error)):
            raise InvalidFileError(
                f"{path}: refused, since it holds Python objects ({found[1] or found[2]}) that can run code when "
                "loaded. Where you trust the file, save only the weights: torch.save(model.state_dict(), path), and "
                "give that one."
            ) from error
        raise InvalidFileError(f"{path}: is no torch checkpoint, or a damaged one.") from error
    except Exception as error:  # a damaged file makes it raise nearly anything
        raise InvalidFileError(f"{path}: is no torch checkpoint, or a damaged one ({first_line(error)}).") from error
    if not isinstance(content, Mapping):
        raise InvalidFileError(f"{path}: holds a {type(content).__name__}; expected a dict of tensors by name.")
    return content


def _open_checkpoint(path: Path) -> io.BytesIO | Path:
    """An archive written anew from its entries, since torch checks no checksums and reads by fields of the directory
    that no checksum covers; other formats as they are, for torch to read or refuse.

    torch does not compress its archives, so that a small file cannot hold more than memory.
    """
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return path
    content = io.BytesIO()
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(content, "w") as checked:
            size = sum(each.file_size for each in archive.infolist())
            if size > path.stat().st_size:
                raise InvalidFileError(
                    f"{path}: its entries are compressed, to {size:,} bytes. Accepted: torch.save's."
                )
            if 2 * size > (memory := find_free_memory()):  # as it is read, and as tensors
                raise InvalidFileError(f"{path}: has {size:,} bytes, and {memory:,} of memory are free.")
            for each in archive.infolist():
                if each.filename in checked.NameToInfo:
                    raise InvalidFileError(f"{path}: damaged: {each.filename} is in it twice.")
                checked.writestr(zipfile.ZipInfo(each.filename), archive.read(each))
    except InvalidFileError:
        raise
    except Exception as error:  # a damaged archive makes it raise nearly anything; a wrong checksum is among it
        raise InvalidFileError(f"{path}: is no torch checkpoint, or a damaged one ({first_line(error)}).") from error
    content.seek(0)
    return content


def _fill(model: nn.Module, weights: dict[str, Tensor], path: str | os.PathLike[str]) -> None:
    expected = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    found = {_unwrap_name(name, expected): value for name, value in weights.items()}
    reshaped = {
        name: f"{name} is {tuple(found[name].shape)} in the file and {tuple(value.shape)} in the model"
        for name, value in expected.items()
        if name in found and not nn.parameter.is_lazy(value) and found[name].shape != value.shape
    }
    mistyped = {
        name: f"{name} is {found[name].dtype}"
        for name, value in expected.items()
        if name in found and value.is_floating_point() and not found[name].is_floating_point()
    }
    unusable = [name for name, _ in model.named_parameters() if name in found and not _is_finite(found[name])]
    fitting = {name: value for name, value in found.items() if name not in {*reshaped, *mistyped}}
    outcome = model.load_state_dict(fitting, strict=False)
    missing = [name for name in outcome.missing_keys if name not in {*reshaped, *mistyped}]
    parts = {
        "Missing": missing,
        "Unexpected": outcome.unexpected_keys,
        "Of another shape": [*reshaped.values()],
        "No floating point": [*mistyped.values()],
        "Not finite": unusable,
    }
    complaints = [f"{what}: {_listed(names)}." for what, names in parts.items() if names]
    if complaints:
        raise InvalidFileError(f"{path}: does not fit the model. {' '.join(complaints)}")


def _is_finite(values: Tensor) -> bool:
    return not values.is_floating_point() or bool(values.isfinite().all())


def _unwrap_name(name: str, expected: Collection[str]) -> str:
    while name not in expected and name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name


def _listed(names: list[str]) -> str:
    shown = ", ".join(str(name) for name in names[:LISTED])
    return f"{shown} and {len(names) - LISTED} more" if len(names) > LISTED else shown or "none"
