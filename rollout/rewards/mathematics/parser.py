r"""Tokens to one expression: a recursive descent with the precedence of written mathematics.

    sum      term (+ or - or \pm term)…
    term     factor, then factors after `*`, `/` or nothing; from left to right, so `1/2x` is half of x
    factor   primary with its `!`, `^` and degrees; `2^10` takes both digits, as in plain text
    primary  number, mixed number, name, group, `\frac`, root, function, binomial, absolute value

Lists, sets, intervals, equations and units are no expressions: `reading` takes them apart first.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from towline.rollout.rewards.mathematics.expression import (
    INFINITY,
    ONE,
    Apply,
    Expression,
    Name,
    Number,
    integer,
    negative,
)  # fmt: skip
from towline.rollout.rewards.mathematics.tokens import FUNCTIONS, Token, Unreadable, read_digits

MAX_DEPTH = 60
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot", "sec": "arcsec", "csc": "arccsc"}
_FUNCTION_NAMES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "tg": "tan", "ctg": "cot"}
_OF_MANY = frozenset({"max", "min", "gcd", "lcm"})
_GREEK = frozenset({
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi",
    "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi",
    "Sigma", "Upsilon", "Phi", "Psi", "Omega", "ell", "hbar",
})  # fmt: skip
_GROUPS = {"(": ")", "[": "]", "{": "}", "lfloor": "rfloor", "lceil": "rceil", "\\{": "\\}"}
_ACCENTS = frozenset({
    "overline", "bar", "vec", "hat", "widehat", "tilde", "overrightarrow", "mathbf",
})  # fmt: skip
_STARTS = frozenset({
    "frac", "binom", "sqrt", "cbrt", "pi", "infty", "boxed", "(", "[", "{", "lfloor", "lceil",
})  # fmt: skip
_END = Token("end of input", "")


def parse(tokens: Sequence[Token]) -> Expression:
    """Raises Unreadable when the tokens are no expression, or nested too deeply."""
    parser = _Parser(tokens)
    expression = parser.whole()
    if parser.next is not _END:
        raise Unreadable(f"{parser.next.text!r} where the expression should end")
    return expression


class _Parser:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = list(tokens)
        self._position = 0
        self._depth = 0
        self._open_bars = 0

    @property
    def next(self) -> Token:
        return self._tokens[self._position] if self._position < len(self._tokens) else _END

    def _peek(self, offset: int) -> Token:
        index = self._position + offset
        return self._tokens[index] if index < len(self._tokens) else _END

    def _take(self, *texts: str) -> str | None:
        token = self.next
        if token.kind in ("symbol", "word") and token.text in texts:
            self._position += 1
            return token.text
        return None

    def _expect(self, text: str) -> None:
        if self._take(text) is None:
            raise Unreadable(f"{self.next.text!r} where {text!r} should stand")

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable(f"nested deeper than {MAX_DEPTH} levels")

    def whole(self) -> Expression:
        r"""All of a group: a sum, or two with `\over` or `\choose` between them."""
        inside = self.sum()
        if self._take("over"):
            return _over(inside, self.sum())
        if self._take("choose"):
            return Apply("binom", (inside, self.sum()))
        return inside

    def sum(self) -> Expression:
        depth = self._depth
        self._deeper()
        terms: list[Expression] = []
        while (sign := self._take("+", "-", "pm", "mp")) or not terms:
            term = self._signed_term(sign)
            if sign in ("pm", "mp"):
                left = _plus(terms) if terms else integer(0)
                terms = [Apply(sign, (left, term))]
                self._deeper()  # each one nests what stands left of it
            else:
                terms.append(term)
        self._depth = depth
        return _plus(terms)

    def _signed_term(self, sign: str | None) -> Expression:
        if sign == "-":
            return negative(self._term())
        return self._term()

    def _term(self) -> Expression:
        factors, is_quotient = [self._factor()], False
        while True:
            if self._take("*"):
                factors.append(self._signed_factor())
            elif self._take("/"):
                divisor = self._signed_factor()
                if len(factors) == 1 and not is_quotient:
                    factors, is_quotient = [_over(factors[0], divisor)], True
                else:
                    factors.append(_over(ONE, divisor))
            elif self._starts_factor():
                if self.next.kind == "number" and self._peek(-1).kind == "number":
                    raise Unreadable("two numbers side by side")
                factors.append(self._factor())
            else:
                return factors[0] if len(factors) == 1 else Apply("*", tuple(factors))

    def _starts_factor(self) -> bool:
        token = self.next
        if token.kind in ("number", "letter"):
            return True
        if token.kind == "word":
            return token.text not in ("and", "or")
        if token.kind != "symbol":
            return False
        if token.text == "|":
            return self._open_bars == 0
        return token.text in _STARTS or token.text in FUNCTIONS or token.text in _GREEK or token.text in _ACCENTS

    def _signed_factor(self) -> Expression:
        self._deeper()
        sign = self._take("-", "+")
        factor = self._signed_factor() if sign else self._factor()
        self._depth -= 1
        return negative(factor) if sign == "-" else factor

    def _factor(self) -> Expression:
        depth = self._depth
        self._deeper()
        factor = self._primary()
        while True:
            if self._take("!"):
                if self._take("!"):
                    raise Unreadable("a double factorial")
                factor = Apply("!", (factor,))
                self._deeper()
            elif self._takes_degrees():
                factor = Apply("degrees", (factor,))
                self._deeper()
            elif self._take("^"):
                factor = Apply("^", (factor, self._exponent()))
                if self.next.text == "^":
                    raise Unreadable("a double superscript")
            else:
                break
        self._depth = depth
        return factor

    def _takes_degrees(self) -> bool:
        if self._take("degree"):
            return True
        if self.next.text == "^" and self._peek(1).text == "circ":
            self._position += 2
            return True
        if [self._peek(offset).text for offset in range(4)] == ["^", "{", "circ", "}"]:
            self._position += 4
            return True
        return False

    def _exponent(self) -> Expression:
        """`^{n}`, or in plain text `^-2`, `^10` and, from right to left, `2^3^2`."""
        if self.next.text == "{":
            return self._group()
        self._deeper()
        sign = self._take("-", "+")
        exponent = self._primary()
        if self._take("^"):
            exponent = Apply("^", (exponent, self._exponent()))
        self._depth -= 1
        return negative(exponent) if sign == "-" else exponent

    def _primary(self) -> Expression:
        token = self.next
        if token.kind == "number":
            self._position += 1
            return self._number(token)
        if token.kind == "letter":
            self._position += 1
            return self._name(token.text)
        if token.kind == "word" or (token.kind == "symbol" and token.text in FUNCTIONS):
            return self._known_word()
        if token.kind != "symbol":
            raise Unreadable(f"{token.text or token.kind!r} where a value should stand")
        return self._symbol(token.text)

    def _symbol(self, text: str) -> Expression:
        if text in _GROUPS and text != "\\{":
            return self._group()
        if text == "|":
            return self._absolute_value()
        if text in _GREEK or text in ("pi", "infty"):
            return self._known_word()
        self._position += 1
        if text == "frac":
            top = self._argument()
            return _over(top, self._argument())
        if text == "binom":
            upper = self._argument()
            return Apply("binom", (upper, self._argument()))
        if text == "boxed":
            return self._group()
        if text in _ACCENTS:
            return self._name(text + " " + "".join(token.text for token in self._raw_group()))
        raise Unreadable(f"{text!r}")

    def _raw_group(self) -> list[Token]:
        """The tokens of an accented name, which is one name whatever its letters are."""
        start = self._position
        self._argument()
        return [token for token in self._tokens[start : self._position] if token.text not in ("{", "}")]

    def _known_word(self) -> Expression:
        word = self.next.text
        self._position += 1
        if word in FUNCTIONS:
            return self._function(_FUNCTION_NAMES.get(word, word))
        if word in ("infinity", "infty"):
            return INFINITY
        if word in ("and", "or"):
            raise Unreadable(f"{word!r} within an expression")
        return self._name(word)

    def _number(self, token: Token) -> Expression:
        number = Number(token.value)
        if not token.text.isdecimal():
            return number
        if self.next.text == "_":
            return self._based(token.text)
        part = self._proper_part()
        return number if part is None else Number(token.value + part)

    def _proper_part(self) -> Fraction | None:
        r"""After a whole number, `\frac{1}{2}` or ` 1/2` of digits alone: the rest of a mixed number."""
        start = self._position
        if self._take("frac"):
            top, bottom = self._digits_argument(), self._digits_argument()
        elif self.next.after_space and self._peek(1).text == "/" and self._peek(2).text.isdecimal():
            top, bottom = self.next.text, self._peek(2).text
            self._position += 3
        else:
            return None
        if top is None or bottom is None or not top.isdecimal() or self.next.text in ("^", "!"):
            self._position = start
            return None
        if read_digits(bottom) == 0:
            raise Unreadable("a mixed number over zero")
        return Fraction(read_digits(top), read_digits(bottom))

    def _digits_argument(self) -> str | None:
        if self.next.kind == "number":
            return self._split_first_digit()
        if self._take("{") is None:
            return None
        digits = self.next.text
        self._position += 1
        return digits if self._take("}") and digits.isdecimal() else None

    def _split_first_digit(self) -> str:
        token = self.next
        if len(token.text) == 1 or not token.text.isdecimal():
            self._position += 1
            return token.text
        rest = token.text[1:]
        self._tokens[self._position] = replace(token, text=rest, value=Fraction(read_digits(rest)), after_space=False)
        return token.text[0]

    def _based(self, digits: str) -> Expression:
        self._expect("_")
        base = self._argument(keeps_digits=True)
        if not isinstance(base, Number) or base.value.denominator != 1:
            raise Unreadable("a base that is no whole number")
        return Number(Fraction(read_in_base(digits, int(base.value))))

    def _name(self, name: str) -> Expression:
        has_index = False
        while True:
            if self.next.text == "'":
                self._position += 1
                name += "'"
            elif self._take("_"):
                start = self._position
                self._index()
                name += "_" + "".join(token.text for token in self._tokens[start : self._position]).strip("{}")
                has_index = True
            else:
                return Name(name) if not has_index or name not in ("i", "e", "pi") else Name(f"{name}_")

    def _index(self) -> None:
        if self.next.kind in ("text", "number", "letter"):
            self._position += 1
        elif self.next.text == "{" and self._peek(1).kind == "text" and self._peek(2).text == "}":
            self._position += 3
        else:
            self._argument(keeps_digits=True)

    def _argument(self, *, keeps_digits: bool = False) -> Expression:
        """What TeX takes as the argument of a command: a group, one digit or one name."""
        if self.next.text == "{" and self.next.kind == "symbol":
            return self._group()
        self._deeper()
        argument: Expression
        if self.next.kind == "number" and self.next.text.isdecimal() and not keeps_digits:
            argument = integer(int(self._split_first_digit()))
        elif self.next.kind == "letter":
            argument = Name(self.next.text)
            self._position += 1
        elif self.next.kind == "number":
            argument = Number(self.next.value)
            self._position += 1
        else:
            argument = self._primary()
        self._depth -= 1
        return argument

    def _group(self) -> Expression:
        opening = self.next.text
        if opening not in _GROUPS:
            raise Unreadable(f"{opening!r} where a group should begin")
        self._position += 1
        bars, self._open_bars = self._open_bars, 0
        inside = self.whole()
        self._open_bars = bars
        self._expect(_GROUPS[opening])
        return Apply({"lfloor": "floor", "lceil": "ceil"}[opening], (inside,)) if opening[0] == "l" else inside

    def _absolute_value(self) -> Expression:
        self._expect("|")
        self._open_bars += 1
        inside = self.sum()
        self._open_bars -= 1
        self._expect("|")
        return Apply("abs", (inside,))

    def _function(self, name: str) -> Expression:
        self._deeper()
        if name in ("sqrt", "cbrt"):
            value = self._root(name)
        elif name in _OF_MANY:
            value = Apply(name, tuple(self._list_argument()))
        else:
            value = self._function_of_one(name)
        self._depth -= 1
        return value

    def _root(self, name: str) -> Expression:
        degree: Expression = integer(3 if name == "cbrt" else 2)
        if self._take("["):
            degree = self.sum()
            self._expect("]")
        radicand = self._group() if self.next.text in ("(", "{") else self._argument()
        return Apply("root", (radicand, degree))

    def _list_argument(self) -> list[Expression]:
        closing = _GROUPS.get(self.next.text)
        if closing is None:
            raise Unreadable("a function of several values without brackets")
        self._position += 1
        values = [self.sum()]
        while self._take(","):
            values.append(self.sum())
        self._expect(closing)
        return values

    def _function_of_one(self, name: str) -> Expression:
        base = self._log_base(name)
        power = self._exponent() if self.next.text == "^" and self._take("^") else None
        if power == Number(Fraction(-1)) and name in _INVERSES:
            name, power = _INVERSES[name], None
        argument = self._function_argument()
        value = Apply("log", (base, argument)) if base is not None else Apply(name, (argument,))
        return value if power is None else Apply("^", (value, power))

    def _log_base(self, name: str) -> Expression | None:
        """Also `\\log_28`, which TeX sets as the logarithm of 8 to base 2."""
        if name == "lg":
            return integer(10)
        if name != "log":
            return None
        if not self._take("_"):
            return integer(10)
        if self.next.kind == "number" and self._peek(1) is _END and len(self.next.text) > 1:
            return self._argument()
        return self._argument(keeps_digits=True)

    def _function_argument(self) -> Expression:
        """A bracketed group; else the product that follows, up to the next operator or function."""
        if self.next.text in ("(", "[", "{"):
            return self._group()
        sign = self._take("-")
        factors = [self._factor()]
        while self._starts_factor() and self.next.text not in FUNCTIONS:
            if self.next.kind == "number":
                break
            factors.append(self._factor())
        argument = factors[0] if len(factors) == 1 else Apply("*", tuple(factors))
        return negative(argument) if sign else argument


def read_in_base(digits: str, base: int) -> int:
    """Raises Unreadable unless every digit is below the base; letters are digits from ten on."""
    values = [int(digit, 36) for digit in digits]
    if not 2 <= base <= 36 or max(values) >= base:
        raise Unreadable(f"{digits[:20]!r} is no number to base {base}")
    value = 0
    for digit in values:
        value = value * base + digit
    return value


def _plus(terms: list[Expression]) -> Expression:
    return terms[0] if len(terms) == 1 else Apply("+", tuple(terms))


def _over(top: Expression, bottom: Expression) -> Expression:
    if isinstance(top, Number) and isinstance(bottom, Number) and bottom.value:
        return Number(top.value / bottom.value)
    return Apply("/", (top, bottom))
