"""Files changed by somebody who means to: the digest fits, so that what is tested is the content."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from critical_neurons.core.documents import digest_content


def forge(text: str, change: Callable[[dict[str, Any]], object]) -> str:
    data = json.loads(text)
    data.pop("digest", None)
    change(data)
    return seal(data)


def seal(data: dict[str, Any]) -> str:
    """As a file, with the digest that fits."""
    return json.dumps({**data, "digest": digest_content(data)})
