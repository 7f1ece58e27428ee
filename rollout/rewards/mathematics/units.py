"""Units after a number: what they measure and how large they are, as far as they are known."""

import re
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Unit:
    dimension: tuple[tuple[str, int], ...] | None
    """Exponents of length, mass, time, angle, money, volume…; None for a word that is not known, as in `5 apples`."""
    factor: Fraction = Fraction(1)


SCALES = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip
PERCENT = frozenset({"percent", "per cent", "%", "percentage points"})
_KNOWN: dict[str, tuple[str, str | int]] = {
    "m meter meters metre metres": ("length", 1),
    "cm centimeter centimeters centimetre centimetres": ("length", "1/100"),
    "mm millimeter millimeters millimetre millimetres": ("length", "1/1000"),
    "km kilometer kilometers kilometre kilometres": ("length", 1000),
    "in inch inches": ("length", "0.0254"), "ft foot feet": ("length", "0.3048"), "yd yard yards": ("length", "0.9144"),
    "mi mile miles": ("length", "1609.344"),
    "g gram grams": ("mass", 1), "kg kilogram kilograms": ("mass", 1000), "mg milligram milligrams": ("mass", "1/1000"),
    "lb lbs pound pounds": ("mass", "453.59237"), "oz ounce ounces": ("mass", "28.349523125"),
    "s sec secs second seconds": ("time", 1), "min mins minute minutes": ("time", 60),
    "h hr hrs hour hours": ("time", 3600), "day days": ("time", 86400), "week weeks": ("time", 604800),
    "year years": ("years", 1), "month months": ("years", "1/12"),
    "l liter liters litre litres": ("volume", 1),
    "ml milliliter milliliters millilitre millilitres": ("volume", "1/1000"),
    "gal gallon gallons": ("gallons", 1), "quart quarts": ("gallons", "1/4"), "pint pints": ("gallons", "1/8"),
    "degree degrees deg": ("degrees", 1), "dollar dollars": ("money", 1), "cent cents": ("money", "1/100"),
}  # fmt: skip
_TABLE = {name: (dimension, Fraction(size)) for names, (dimension, size) in _KNOWN.items() for name in names.split()}
_FUSED = {"mph": "miles/hour", "kph": "km/hour", "kmh": "km/hour"}
_PIECE = re.compile(
    r"\s*(?P<over>/|per\s)?\s*(?P<area>sq\.?|square|cubic)?\s*(?P<name>[a-z]+)\.?(?:\^(?P<power>-?[1-9]))?"
)
_AREAS = {"sq": 2, "square": 2, "cubic": 3}
DEGREES, MONEY = Unit((("degrees", 1),)), Unit((("money", 1),))


def read_unit(text: str) -> Unit:
    r"""`square feet`, `cm^2`, `miles per hour`, `m/s`; of what is not known nothing is said but that it is a unit."""
    text = re.sub(r"\s*(?:squared|cubed)", lambda word: "^2" if "sq" in word[0] else "^3", text.lower().strip())
    exponents: dict[str, int] = {}
    factor, position, is_over = Fraction(1), 0, False
    text = _FUSED.get(text, text)
    while position < len(text):
        piece = _PIECE.match(text, position)
        if piece is None or piece["name"] not in _TABLE:
            return Unit(None)
        dimension, size = _TABLE[piece["name"]]
        is_over = is_over or piece["over"] is not None
        power = int(piece["power"] or 1) * _AREAS.get((piece["area"] or "").rstrip("."), 1) * (-1 if is_over else 1)
        exponents[dimension] = exponents.get(dimension, 0) + power
        factor *= size**power
        position = piece.end()
    kept = tuple(sorted((name, power) for name, power in exponents.items() if power))
    return Unit(kept, factor) if kept else Unit(None)
