"""Outputs of commands: paths checked before the work, smaller weights and their plan written after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from critical_neurons.errors import InvalidSettingError, OutputError

if TYPE_CHECKING:
    from torch import nn

    from critical_neurons import Plan

PLAN_KEY = "critical_neurons.plan"
"""Where the plan stands in the metadata of the smaller weights."""


def check_outputs(
    output: Path | None, plan: Path | None, folder: Path | None, *, dry_run: bool, overwrite: bool = False
) -> None:
    from critical_neurons.files import check_folder, check_writable

    if dry_run:
        return
    if output is None and plan is None and folder is None:
        raise InvalidSettingError(
            "Say where the result goes with --save, --output or --plan, or look first with --dry-run."
        )
    if output is not None and output.suffix != ".safetensors":
        raise OutputError(f"{output}: weights are written as safetensors; give a name that ends in .safetensors.")
    for path in (output, plan):
        if path is not None:
            check_writable(path)
    if folder is not None:
        from critical_neurons.keeping import FILES

        check_folder(folder, FILES, overwrite=overwrite)


def write_smaller(
    smaller: nn.Module,
    plan: Plan,
    output: Path | None,
    plan_path: Path | None,
    folder: Path | None,
    *,
    overwrite: bool = False,
) -> None:
    from safetensors.torch import save

    import critical_neurons as cn
    from critical_neurons.files import write_atomically

    if output is not None:
        tensors = {name: values.contiguous().clone() for name, values in smaller.state_dict().items()}
        write_atomically(output, save(tensors, metadata={PLAN_KEY: json.dumps(plan.to_dict())}))
    if plan_path is not None:
        plan.save(plan_path)
    if folder is not None:
        cn.save(smaller, folder, plan=plan, overwrite=overwrite)
