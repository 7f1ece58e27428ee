r"""Text to tokens. Spaces are dropped, but a token knows whether one stood before it."""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_TOKENS = 3000
MAX_POWER_OF_TEN = 2000
"""In `6.02e23`; written as `10^{23}` it is bounded where powers are worked out."""
DIGITS_AT_ONCE = 4000
"""CPython refuses to read more than 4,300 digits at a time."""


class Unreadable(Exception):
    """The answer is not of a form that is read here; the message says what stood in the way."""


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    r"""number, letter, word (`sin`, `pi`), text (of `\text{…}`), begin or end (of an environment), or symbol.

    Commands are symbols under their name without the backslash, except that `\{` and the like keep it.
    """
    text: str
    value: Fraction = Fraction(0)
    after_space: bool = False


FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "arccot",
    "arcsec", "arccsc", "asin", "acos", "atan", "ln", "log", "lg", "exp", "sqrt", "cbrt", "max", "min", "gcd", "lcm",
    "abs",
})  # fmt: skip
WORDS = FUNCTIONS | {"pi", "infinity", "infty", "and", "or", "theta", "alpha", "beta", "phi", "lambda"}
SHORT_UNITS = frozenset({
    "cm", "mm", "km", "kg", "mg", "ml", "mL", "mph", "kph", "ft", "in", "yd", "mi", "lb", "lbs", "oz", "sq", "hr",
    "hrs", "min", "mins", "sec", "secs", "am", "pm",
})  # fmt: skip

_SPACE = r"(?P<space>(?:\s|\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\\(?:thin|med|thick)space(?![A-Za-z]))+)"
_SURE_GROUPS = r"[1-9][0-9]{0,2}(?:(?:\{,\}|\\[,;: ]|~)[0-9]{3})+(?![0-9])"
_COMMA_GROUPS = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])"
_REST = (
    r"|(?P<environment>\\(?P<edge>begin|end)\s*\{(?P<name>[a-zA-Z]+\*?)\}(?:\s*\{[lcr|]+\}|\s*\[[lcrtb|]+\])?)"
    r"|(?P<text>\\(?P<face>text(?:rm|bf|it|sf|tt|sc|normal|up|md)?|math(?:rm|bf|it|sf|tt|op|cal|scr|bb)|mbox|hbox|"
    r"operatorname\*?)\s*\{(?P<content>[^{}]*)\})"
    r"|(?P<command>\\(?:[A-Za-z]+|.))|(?P<word>[A-Za-z]+)(?P<abbreviated>\.(?=\s|$))?"
    r"|(?P<symbol>\*\*|<=|>=|=<|=>|!=|==|[-+*/^_!()\[\]{}|,;:=<>&%'$])"
)


def _lexer(integer: str) -> re.Pattern[str]:
    number = (
        rf"(?P<number>(?P<plain>(?:{integer}|[0-9]+\{{,\}}[0-9]+|[0-9]+)(?:\.(?![.])[0-9]*)?|\.[0-9]+)"
        r"(?:\\(?:overline|bar)\s*\{(?P<period>[0-9]+)\}|[eE](?P<exponent>[-+]?[0-9]{1,5})(?![0-9A-Za-z]))?)"
    )
    return re.compile(rf"{_SPACE}|{number}{_REST}", re.DOTALL)


_SEPARATE_LEXER = _lexer(_SURE_GROUPS)
_GROUPED_LEXER = _lexer(f"{_SURE_GROUPS}|{_COMMA_GROUPS}")
COMMA_GROUPS = re.compile(rf"(?<![0-9.,]){_COMMA_GROUPS}")
_SURE_NUMBER = re.compile(rf"(?:{_SURE_GROUPS})(?:\.[0-9]*)?")
_COMMANDS_WITH_BACKSLASH = frozenset("{}|$%&#\\_")
_SYNONYMS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "leq": "le", "leqslant": "le", "lt": "<", "<=": "le", "=<": "le", "geq": "ge", "geqslant": "ge", "gt": ">",
    ">=": "ge", "neq": "ne", "!=": "ne", "==": "=", "eq": "=", "times": "*", "cdot": "*", "ast": "*", "div": "/",
    "**": "^", "lbrace": "\\{", "rbrace": "\\}", "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")",
    "lvert": "|", "rvert": "|", "vert": "|", "\\%": "%", "\\$": "$", "simeq": "approx", "thickapprox": "approx",
    "backslash": "setminus", "smallsetminus": "setminus", "varnothing": "emptyset", "land": "and", "lor": "or",
    "wedge": "and", "vee": "or", "colon": ":", "degree": "degree", "varphi": "phi", "vartheta": "theta",
    "varepsilon": "epsilon",
}  # fmt: skip


def tokenize(text: str, *, groups_digits: bool) -> list[Token]:
    """Split LaTeX into tokens.

    Args:
        groups_digits: whether `1,234` is one number. `1{,}234` always is.

    Raises:
        Unreadable: a character that no answer has, or too many tokens.
    """
    tokens: list[Token] = []
    lexer = _GROUPED_LEXER if groups_digits else _SEPARATE_LEXER
    position, after_space = 0, False
    while position < len(text):
        match = lexer.match(text, position)
        if match is None:
            raise Unreadable(f"the character {text[position]!r}")
        position = match.end()
        if match["space"] is not None:
            after_space = True
            continue
        tokens.extend(_tokens_of(match, tokens, text, after_space))
        after_space = False
        if len(tokens) > MAX_TOKENS:
            raise Unreadable(f"more than {MAX_TOKENS} symbols")
    return tokens


def _tokens_of(match: re.Match[str], before: list[Token], text: str, after_space: bool) -> list[Token]:
    if match["number"] is not None:
        value = _decimal(match["plain"], match["period"], match["exponent"])
        return [Token("number", match["number"], value, after_space)]
    if match["symbol"] is not None:
        return [Token("symbol", _SYNONYMS.get(match["symbol"], match["symbol"]), after_space=after_space)]
    if match["word"] is not None:
        is_unit = (
            bool(before)
            and before[-1].kind in ("number", "text")
            and (match["word"] == "sq" or text[match.end() : match.end() + 1] in ("", "^", "/"))
        )
        return _letters(match["word"], after_space, is_unit=is_unit)
    if match["command"] is not None:
        command = match["command"] if match["command"][1] in _COMMANDS_WITH_BACKSLASH else match["command"][1:]
        return [Token("symbol", _SYNONYMS.get(command, command), after_space=after_space)]
    if match["environment"] is not None:
        return [Token(match["edge"], match["name"].removesuffix("*"))]
    return _written(match["content"], match["face"], after_space)


def _written(content: str, face: str, after_space: bool) -> list[Token]:
    r"""What stands in `\text{…}`, `\mathrm{…}` and the like: words, or a letter that is only set in another face."""
    words = " ".join(content.replace("~", " ").replace("\\ ", " ").split())
    if face == "mathbb":
        return [Token("symbol", f"mathbb {words}", after_space=after_space)]
    if words in FUNCTIONS:
        return [Token("word", words, after_space=after_space)]
    if len(words) == 1 and words.isalpha() and face.startswith("math") and (face != "mathrm" or words in "ide"):
        return [Token("letter", words, after_space=after_space)]
    if words.strip(",; ") in ("and", "or"):
        return [Token("word", words.strip(",; "), after_space=after_space)]
    return [Token("text", words, after_space=after_space)] if words else []


def _letters(word: str, after_space: bool, *, is_unit: bool) -> list[Token]:
    """A known word; a unit after a number; a longer word; or a run of letters, each a variable."""
    if is_unit and word in SHORT_UNITS:
        return [Token("text", word, after_space=after_space)]
    if word in WORDS:
        return [Token("word", word, after_space=after_space)]
    if len(word) > 3 and word.islower():
        for known in ("sqrt", "pi"):  # 3xsqrt(2), 12xpi
            if word.endswith(known) and len(word) <= len(known) + 2:
                return [*_letters(word.removesuffix(known), after_space, is_unit=False), Token("word", known)]
        return [Token("text", word, after_space=after_space)]
    return [Token("letter", letter, after_space=after_space and index == 0) for index, letter in enumerate(word)]


def _decimal(plain: str, period: str | None, exponent: str | None) -> Fraction:
    r"""Exact value of `1{,}234.5`, `0.1\overline{6}` or `6.02e23`."""
    if plain.isdecimal() and period is None and exponent is None:
        return Fraction(read_digits(plain))
    if exponent is not None and abs(int(exponent)) > MAX_POWER_OF_TEN:
        raise Unreadable(f"a power of ten above {MAX_POWER_OF_TEN}")
    if "{,}" in plain and not _SURE_NUMBER.fullmatch(plain):
        plain = plain.replace("{,}", ".")  # a decimal comma
    if plain.count(".") > 1:
        raise Unreadable("a number with two decimal points")
    whole, _, decimals = re.sub(r"[^0-9.]", "", plain).partition(".")
    value = Fraction(read_digits(whole + decimals), 10 ** len(decimals))
    if period is not None:
        value += Fraction(read_digits(period), (10 ** len(period) - 1) * 10 ** len(decimals))
    return value * Fraction(10) ** int(exponent) if exponent is not None else value


def read_digits(digits: str) -> int:
    value = 0
    for start in range(0, len(digits), DIGITS_AT_ONCE):
        piece = digits[start : start + DIGITS_AT_ONCE]
        value = value * 10 ** len(piece) + int(piece)
    return value
