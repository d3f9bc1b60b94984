"""Model card: the README.md of a smaller network for the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from torch import nn

from critical_neurons.core.comparison import Comparison
from critical_neurons.core.markdown import format_table
from critical_neurons.core.plan import Plan
from critical_neurons.core.span import WHOLE
from critical_neurons.errors import InvalidSettingError

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
"""Names of models on the hub: `organisation/name`, or only a name."""

TAGS = ("pruning", "model-compression", "pytorch")

HOW_TO_LOAD = """\
## How to load it

```python
import critical_neurons as cn

model = cn.load("path/to/this/folder", make_model)
```

`make_model` is a function that returns the original, unpruned architecture with any weights. The plan in `plan.json`
says which channels to remove from it, and the weights come from `model.safetensors`. No code from this folder is run.
From the hub, `huggingface_hub.snapshot_download("name/of-this-model")` gives the path.
"""


def write_card(
    model: nn.Module, plan: Plan, *, comparison: Comparison | None, base_model: str | None, weight_bytes: int
) -> str:
    """Markdown after a YAML header. Names of layers come from the user and are escaped."""
    if base_model is not None and not (isinstance(base_model, str) and REPOSITORY.fullmatch(base_model)):
        raise InvalidSettingError(
            f"base_model: found {base_model!r}. Accepted: the name of a model on the Hugging Face hub, such as "
            "'timm/resnet18.a1_in1k'."
        )
    if comparison is not None and not isinstance(comparison, Comparison):
        raise InvalidSettingError(
            f"comparison: found {type(comparison).__name__}. Accepted: what cn.compare returns, or None."
        )
    original = f"[{base_model}](https://huggingface.co/{base_model})" if base_model else "a trained network"
    parts = [
        "\n".join(["---", *_describe_metadata(comparison, base_model), "---\n"]),
        "# A smaller network\n",
        f"Made from {original} by removing channels with `critical_neurons`.\n",
        _describe_sizes(model, plan, comparison, weight_bytes),
        _describe_layers(plan),
        HOW_TO_LOAD,
    ]
    return "\n".join(parts)


def _describe_metadata(comparison: Comparison | None, base_model: str | None) -> list[str]:
    """The lines of the header. JSON is YAML, so every value is written as JSON."""
    values: dict[str, object] = {"library_name": "critical_neurons", "tags": [*TAGS, "safetensors"]}
    if base_model:
        values["base_model"] = base_model
    if comparison is not None and comparison.after.accuracy is not None:
        kind = f"{comparison.data} data"
        result = {
            "task": {"type": "other", "name": "Classification"},
            "dataset": {"type": "custom", "name": f"{comparison.inputs} inputs, {kind}"},
            "metrics": [{"type": "accuracy", "name": f"accuracy, {kind}", "value": comparison.after.accuracy}],
        }
        values |= {"metrics": ["accuracy"], "model-index": [{"name": "smaller network", "results": [result]}]}
    return [f"{name}: {json.dumps(value)}" for name, value in values.items()]


def _describe_sizes(model: nn.Module, plan: Plan, comparison: Comparison | None, weight_bytes: int) -> str:
    if comparison is not None:
        notes = "\n".join(f"- {_escape(note)}" for note in comparison.notes)
        return f"## Before and after\n\n{_table(('', 'before', 'after', ''), comparison.rows)}\n{notes}\n"
    count = f"{sum(values.numel() for values in model.parameters()):,}"
    if plan.span == WHOLE:  # otherwise the plan has the costs of a part only
        count += f" of {sum(product.amount for product in plan.structure.params):,}"
    return f"## Size\n\n{count} parameters, {weight_bytes:,} bytes in `model.safetensors`.\n"


def _describe_layers(plan: Plan) -> str:
    rows = [
        (layer.name, str(layer.total), str(len(layer.kept))) for layer in plan.layers if len(layer.kept) < layer.total
    ]
    whole = len(plan.layers) - len(rows)
    text = f"## Layers\n\nThe plan: {_escape(plan.rule)}. Layers that keep all channels: {whole}.\n"
    return f"{text}\n{_table(('layer', 'channels before', 'after'), rows)}" if rows else text


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(format_table(header, (map(_escape, row) for row in rows))) + "\n"


def _escape(text: str) -> str:
    """Escape everything that Markdown or HTML could interpret."""
    return "".join(each if each.isalnum() or each in " .,:;%+-_/()=" else f"&#{ord(each)};" for each in text)
