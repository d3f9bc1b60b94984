"""Outputs of commands: paths are checked before the work, and files written after it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

from critical_neurons.errors import InvalidSettingError, OutputError

if TYPE_CHECKING:
    from torch import nn

    from critical_neurons import Plan
    from critical_neurons.io.exporters import Export

WEIGHTS_ENDING = ".safetensors"

PLAN_KEY = "critical_neurons.plan"
"""Key of the plan in the metadata of the smaller weights."""


Read: TypeAlias = Sequence[tuple[str, str | Path | None]]
"""The files that a command reads, each with its option."""


def check_files(outputs: Sequence[tuple[str, Path | None]], read: Read = (), *, folder: Path | None = None) -> None:
    """Raise if two options name the same output, or if an output is also read, lies in the folder of --save, or
    cannot be written."""
    from critical_neurons.core.files import check_writable

    places = [(option, path, path.resolve()) for option, path in outputs if path is not None]
    readers = {Path(path).resolve(): option for option, path in read if path is not None}
    for _, path, place in places:
        if folder is not None and folder.resolve() in (place, *place.parents):
            raise OutputError(f"{path}: lies in the folder of --save, which holds nothing else. Give another path.")
        if place in readers:
            raise OutputError(f"{path}: this command reads it, for {readers[place]}. Give another path.")
        options = [option for option, _, other in places if other == place]
        if len(options) > 1:
            flags = " and ".join(dict.fromkeys(options)) + (" twice" if len(set(options)) == 1 else "")
            raise OutputError(f"{path}: given to {flags}. Give two paths.")
        check_writable(path)


def check_outputs(
    output: Path | None,
    plan: Path | None,
    folder: Path | None,
    *,
    read: Read = (),
    dry_run: bool,
    overwrite: bool = False,
) -> None:
    from critical_neurons.core.files import check_folder

    if dry_run:
        return
    if output is None and plan is None and folder is None:
        raise InvalidSettingError(
            "Say where the result goes with --save, --output or --plan, or look first with --dry-run."
        )
    if output is not None and output.suffix != WEIGHTS_ENDING:
        from critical_neurons.io.exporters import EXPORTERS, check_format

        if output.suffix not in EXPORTERS:
            raise OutputError(
                f"{output}: give a name that ends in {WEIGHTS_ENDING}, for weights, or in {' or '.join(EXPORTERS)}, "
                "for the network."
            )
        check_format(output)
    check_files([("--output", output), ("--plan", plan)], read, folder=folder)
    if folder is not None:
        from critical_neurons.io.checkpoint import WRITTEN

        check_folder(folder, WRITTEN, overwrite=overwrite)


def check_exports(
    paths: Sequence[Path], folder: Path | None, *, read: Read, overwrite: bool, report: Path | None = None
) -> None:
    """Raise unless there is a folder for `save` or a file for `export`, and these and the `report` do not
    conflict."""
    if folder is None and not paths:
        raise InvalidSettingError("Say where the result goes: a folder with --save, or a file with --output.")
    if folder is not None:
        check_outputs(None, None, folder, dry_run=False, overwrite=overwrite)
    from critical_neurons.io.exporters import check_format

    check_files([*(("--output", path) for path in paths), ("--report", report)], read, folder=folder)
    for path in paths:
        check_format(path)


def name_written(*paths: Path | None) -> str:
    """The message at the end of a command."""
    return f"Written: {', '.join(str(path) for path in paths if path)}"


def write_exported(
    model: nn.Module, paths: Sequence[Path], example: Any, save: Callable[[], None] | None
) -> list[Export]:
    """Export and save; nothing is written before every export has been made and checked."""
    import critical_neurons as cn
    from critical_neurons.core.files import write_atomically

    with TemporaryDirectory() as drafts:
        exports = [
            cn.export(model, Path(drafts, f"{place}{path.suffix}"), example) for place, path in enumerate(paths)
        ]
        if save is not None:
            save()
        for path, made in zip(paths, exports, strict=True):
            write_atomically(path, made.path.read_bytes())
    return [replace(made, path=path) for path, made in zip(paths, exports, strict=True)]


def write_smaller(
    smaller: nn.Module,
    plan: Plan,
    output: Path | None,
    plan_path: Path | None,
    folder: Path | None,
    example: Any,
    *,
    overwrite: bool = False,
) -> None:
    from safetensors.torch import save

    import critical_neurons as cn
    from critical_neurons.core.files import write_atomically

    if output is not None and output.suffix != WEIGHTS_ENDING:
        cn.export(smaller, output, example)
    elif output is not None:
        tensors = {name: values.contiguous().clone() for name, values in smaller.state_dict().items()}
        write_atomically(output, save(tensors, metadata={PLAN_KEY: json.dumps(plan.to_dict())}))
    if plan_path is not None:
        plan.save(plan_path)
    if folder is not None:
        cn.save(smaller, folder, plan=plan, overwrite=overwrite)
