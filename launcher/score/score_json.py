"""A score as a line of JSON has it, written and read back. What failed is null with a status, never a number."""

import math
from collections.abc import Mapping
from typing import Any, cast

from towline.launcher.score.sample import EarlierScore
from towline.storage.dataset_rows import json_kind
from towline.storage.datasets import Rejected
from towline.storage.records import Score

FIELD = "towline_score"
"""Of a line; an object, or a list of them where the line has a list of completions."""


def score_json(score: Score, weights: Mapping[str, float], code_hash: str) -> dict[str, Any]:
    return {
        "total": _finite(score.total),
        "status": score.status.name.lower(),
        "seconds": _finite(score.seconds),
        "detail": score.detail,
        "parts": {
            name: {
                "value": _finite(score.parts[name]),
                "status": score.part_status[name].name.lower(),
                "seconds": _finite(score.part_seconds[name]),
                "weight": weight,
            }
            for name, weight in weights.items()
        },
        "code_hash": code_hash,
    }


def earlier_score(value: object, name: str) -> EarlierScore | None:
    """Read what `score_json` wrote, a number (the total), or an object of numbers (parts, and `total` if it is there).

    Raises:
        Rejected: it is none of them.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        return EarlierScore(parts={}, total=_number(value, name))
    fields = cast("dict[str, object]", value)
    parts = fields.get("parts")
    if isinstance(parts, dict):
        values = {part: _part_value(one, f"{name}.parts.{part}") for part, one in cast("dict[str, Any]", parts).items()}
    else:
        values = {part: _number(one, f"{name}.{part}") for part, one in fields.items() if part != "total"}
    return EarlierScore(parts=values, total=_number(fields["total"], f"{name}.total") if "total" in fields else None)


def _part_value(part: object, name: str) -> float:
    fields = cast("dict[str, object]", part if isinstance(part, dict) else {})
    if "value" not in fields:
        raise Rejected(f'field "{name}" has no value; expected an object with one, as towline score writes it')
    return _number(fields["value"], f"{name}.value")


def _number(value: object, name: str) -> float:
    """null is a score that failed."""
    if value is None:
        return math.nan
    if not isinstance(value, int | float):
        raise Rejected(f'field "{name}" is {json_kind(value)}; expected a score: a number, true, false or null')
    try:
        return float(value)
    except OverflowError:
        raise Rejected(f'field "{name}" is too large for a score') from None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
