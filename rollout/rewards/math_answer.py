r"""Grade a mathematical answer exactly: numbers as fractions, anything else as normalised text.

There is no evaluator here. Numbers (integers, decimals, digit groups, `\frac{a}{b}`, `a/b`, mixed numbers, powers of
ten) are read by regular expressions into `fractions.Fraction` with bounded digits. Every other answer is compared as
text, and two texts that differ are undecided, not wrong: `\sqrt{12}` may be `2\sqrt{3}`.

Conventions: a unit after a number is dropped (`5\text{ cm}` is 5, `90^\circ` is 90); a percentage equals only the same
percentage; `x = 5` is 5; a box wins over a `#### 72` line; only what follows the thinking is read.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from towline.rollout.rewards.boxed import after_thinking, last_boxed
from towline.rollout.rewards.verdict import Verdict
from towline.storage.errors import DataError
from towline.storage.records import ScoreStatus

MAX_NUMBER_CHARS = 1000
"""A longer answer is compared as text: integer arithmetic on it would be slow, and CPython refuses 4,300 digits."""
MAX_EXPONENT = 1000
"""Largest |n| of a power of ten that is worked out."""
ANSWER_MARK = "####"

_SEPARATOR = r"(?:,|\{,\}|\\[,;]|[\u00a0\u2009\u202f])"
_INTEGER = rf"(?:[1-9][0-9]{{0,2}}(?:{_SEPARATOR}[0-9]{{3}})+|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_NUMERATOR = rf"\{{\s*(?P<top>[-+]?{_DECIMAL})\s*\}}|(?P<top_digit>[0-9])"
_DENOMINATOR = rf"\{{\s*(?P<bottom>[-+]?{_DECIMAL})\s*\}}|(?P<bottom_digit>[0-9])"

_DECIMAL_NUMBER = re.compile(_DECIMAL)
_FRAC = re.compile(rf"(?P<whole>{_INTEGER})?\s*\\frac\s*(?:{_NUMERATOR})\s*(?:{_DENOMINATOR})")
_SLASH = re.compile(
    rf"(?:(?P<whole>{_INTEGER})\s+(?=[0-9]+\s*/))?(?P<top>{_DECIMAL})\s*/\s*(?P<bottom>[-+]?{_DECIMAL})"
)
_TIMES = r"(?:\\times|\\cdot|[\u00d7\u00b7*])"
_SCIENTIFIC = re.compile(
    rf"(?:(?P<factor>{_DECIMAL})\s*{_TIMES}\s*)?"
    rf"10\s*\^\s*(?:\{{\s*(?P<power>[-+]?[0-9]+)\s*\}}|(?P<digit>[0-9]))"
    rf"|(?P<mantissa>{_DECIMAL})[eE](?P<exponent>[-+]?[0-9]+)"
)
_CURRENCY = re.compile(r"([-+]?)\s*\\?\$\s*")
_DEGREES = re.compile(r"(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|°)$")
_UNIT = re.compile(
    r"\\(?:text|textrm|mathrm|mbox)\s*\{(?P<words>[A-Za-z\s./-]*)\}\s*(?:\^\s*(?:[0-9]|\{\s*[0-9]\s*\}))?$"
)
_NOT_UNITS = {"and", "base", "billion", "dozen", "hundred", "less", "million", "more", "or", "percent", "thousand"}
_SIZES = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])\s*")
_WRAPPED = re.compile(r"\$([^$]*)\$|\\\(([^()]*)\\\)|\\\[([^][]*)\\\]|\\text\s*\{([^{}]*)\}")
_TEXT_SPACES = re.compile(r"\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    value: Fraction
    is_percent: bool


def grade(completion: str, gold: str) -> Verdict:
    """1.0 if the completion's final answer equals the gold answer, 0.0 if not, FAILED if that cannot be told."""
    wanted = gold_answer(gold)
    found = final_answer(completion)
    if found is None:
        return Verdict(value=0.0, detail="no boxed answer")
    is_equal = equivalent(found, wanted)
    if is_equal is None:
        detail = f"cannot tell whether {found[:100]!r} equals {wanted[:100]!r}: neither is a plain number"
        return Verdict(value=None, status=ScoreStatus.FAILED, detail=detail)
    return Verdict(value=float(is_equal))


def equivalent(prediction: str, gold: str) -> bool | None:
    """Compare two answers; None if they are two different texts, of which neither is a number."""
    found, wanted = read_number(prediction), read_number(gold)
    if found is not None and wanted is not None:
        return found == wanted
    text = normalise(prediction)
    if text == normalise(gold):
        return True
    # Text where a number is wanted is wrong even when it would work out to that number: training pays for the number.
    return False if found is not None or wanted is not None or not text else None


def gold_answer(gold: str) -> str:
    """The answer itself, out of a plain answer or a worked solution that ends in `#### 72` or in a box."""
    final = gold.rpartition(ANSWER_MARK)[2]
    boxed = last_boxed(final)
    answer = (final if boxed is None else boxed).strip()
    if not answer:
        raise DataError(f"the gold answer is empty: {gold[-200:]!r}; give each row of the dataset an answer")
    return answer


def final_answer(completion: str) -> str | None:
    """The last box; without one, a number after the last `####`, since GSM8K solutions teach that form."""
    boxed = last_boxed(completion)
    if boxed is not None:
        return boxed
    _, mark, rest = (after_thinking(completion) or "").rpartition(ANSWER_MARK)
    line = rest.strip(" \t").partition("\n")[0].strip() if mark else ""
    return line if read_number(line) is not None else None


def read_number(answer: str) -> Quantity | None:
    """Read an answer that is one number, with whatever sign, currency, unit or per cent sign stands around it."""
    if len(answer) > MAX_NUMBER_CHARS:
        return None
    text = _without_unit(undress(answer))
    number = text.removesuffix("%").removesuffix("\\").rstrip() if text.endswith("%") else text
    value = _read_signed(_CURRENCY.sub(r"\1", number, count=1))
    return None if value is None else Quantity(value=value, is_percent=number != text)


def undress(answer: str) -> str:
    """Remove what changes how an answer looks and not what it says."""
    text = answer.replace("\u2212", "-").replace("\u2013", "-")
    text = _SIZES.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = re.sub(r"\\!\s*", "", text).strip().removesuffix(".").strip()
    if wrapped := _WRAPPED.fullmatch(text):
        text = "".join(group or "" for group in wrapped.groups()).strip()
    name, equals, value = text.partition("=")
    return value.strip() if equals and len(name.strip()) == 1 and name.strip().isalpha() else text


def normalise(answer: str) -> str:
    r"""The form in which answers that are not numbers are compared; case matters (`x` and `X` are two variables)."""
    text = " ".join(_TEXT_SPACES.sub(" ", undress(answer)).split())
    text = re.sub(r"(?<![0-9]) | (?![0-9])", "", text)  # a space between two digits keeps them apart
    return re.sub(r"\{([A-Za-z0-9])\}", r"\1", text)  # \sqrt{3} and \sqrt3 are the same to TeX


def _without_unit(text: str) -> str:
    text = _DEGREES.sub("", text).rstrip()
    unit = _UNIT.search(text)
    if unit is None or _NOT_UNITS & set(unit["words"].lower().split()):
        return text
    return re.sub(r"(?:\\[,; ]|~|\s)+$", "", text[: unit.start()])


def _read_signed(text: str) -> Fraction | None:
    unsigned = text[1:].lstrip() if text.startswith(("-", "+")) else text
    value = _read_unsigned(unsigned)
    return -value if value is not None and text.startswith("-") else value


def _read_unsigned(text: str) -> Fraction | None:
    if _DECIMAL_NUMBER.fullmatch(text):
        return _fraction(text)
    if ratio := _FRAC.fullmatch(text):
        return _ratio(ratio["whole"], ratio["top"] or ratio["top_digit"], ratio["bottom"] or ratio["bottom_digit"])
    if ratio := _SLASH.fullmatch(text):
        return _ratio(ratio["whole"], ratio["top"], ratio["bottom"])
    if power := _SCIENTIFIC.fullmatch(text):
        exponent = int(power["power"] or power["digit"] or power["exponent"])
        factor = _fraction(power["factor"] or power["mantissa"] or "1")
        return factor * Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None
    return None


def _ratio(whole: str | None, top: str, bottom: str) -> Fraction | None:
    numerator, denominator = _fraction(top), _fraction(bottom)
    if denominator == 0:
        return None
    ratio = numerator / denominator
    if whole is None:
        return ratio
    return _fraction(whole) + ratio if ratio >= 0 else None


def _fraction(decimal: str) -> Fraction:
    """Exact value of what `_DECIMAL` matches: everything that is neither sign, digit nor point is a separator."""
    return Fraction(re.sub(r"[^-+0-9.]", "", decimal))
