"""Provenance: settings, versions, machine and digests of a result, by heading."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from critical_neurons.core.comparison import Comparison
from critical_neurons.core.curve import Curve
from critical_neurons.core.environment import describe_versions
from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.core.structure import Structure

APART = ("inputs", "versions")
"""Settings that are shown elsewhere on the page."""

DIGESTED = {"weights": "weights", "inputs": "inputs seen", "test": "inputs measured on"}
"""Settings of a curve that are digests, and what they are digests of."""

LISTED = 12
"""A setting with more values than this, such as labels, is shown as their number."""


def list_facts(
    structure: Structure | None,
    comparison: Comparison | None,
    scores: Scores | None,
    plan: Plan | None,
    curve: Curve | None,
    files: Mapping[str, str],
) -> dict[str, dict[str, str]]:
    """Settings, versions, machine and digests by heading. `files`: digests of files, by name."""
    settings: Mapping[str, Any] = {}
    if scores is not None:
        asked = {} if scores.budget is None else {"budget": scores.budget.to_dict()}
        settings = {**scores.plain_settings, **asked, "compensate": scores.compensate, "span": vars(scores.span)}
    elif plan is not None:
        settings = plan.provenance.get("settings", {})
    elif curve is not None:
        settings = {name: value for name, value in curve.settings.items() if name not in DIGESTED}
    versions = {**settings.get("versions", {}), **({} if comparison is None else comparison.versions)}
    seen = sorted(plan.seen if plan is not None else scores.inputs if scores is not None else ())
    made_of = {} if structure is None else vars(structure.fingerprint)
    digests = {f"digest of the {name}": text for name, text in made_of.items()}
    if curve is not None and not digests:
        known = {what: curve.settings[name] for name, what in DIGESTED.items() if name in curve.settings}
        digests = {f"digest of the {what}": text for what, text in known.items()}
    if seen:
        digests[f"digest of the {len(seen)} inputs seen"] = hashlib.sha256("".join(seen).encode()).hexdigest()
    facts = {
        "Settings": dict(_flatten({name: value for name, value in settings.items() if name not in APART})),
        "Versions": versions or describe_versions("torch"),
        "Machine": {} if comparison is None else dict(_flatten(comparison.machine)),
        "Digests": digests | {f"SHA-256 of {name}": text for name, text in files.items()},
    }
    return {heading: found for heading, found in facts.items() if found}


def _flatten(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{above}{name}.")
        elif value is not None and value not in ([], ()):
            yield f"{above}{name}", _show(value)


def _show(value: Any) -> str:
    if not isinstance(value, list | tuple):
        return str(value)
    return ", ".join(map(str, value)) if len(value) <= LISTED else f"{len(value)} values"
