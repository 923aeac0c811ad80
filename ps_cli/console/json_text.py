"""Documents as JSON for other programs: JSON has no number that is not finite, so null is it."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(document: object) -> str:
    """The document as indented JSON, with null for numbers that are not finite."""
    return json.dumps(finite(document), indent=2, allow_nan=False)


def finite(value: Any) -> Any:
    """The value, of dicts, lists and plain values, with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {str(name): finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
