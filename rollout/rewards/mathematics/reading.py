r"""Text to an answer. Some texts have two readings: `1,234` is a number and a list, `yes` a word and a product.

The reader works from the outside in: separators of a list, then set operations, relations, brackets, and what is left
is one value. Only its expression goes to the parser.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

from towline.rollout.rewards.mathematics.answers import (
    Answer,
    Assignment,
    Bounds,
    Equation,
    Inequality,
    Matrix,
    Members,
    NotRead,
    Ratio,
    Region,
    Steps,
    Value,
    Words,
)  # fmt: skip
from towline.rollout.rewards.mathematics.expression import (
    INFINITY,
    MINUS_INFINITY,
    Apply,
    Expression,
    Name,
    choose_sign,
    difference,
    has_sign_choice,
    integer,
    variables,
)  # fmt: skip
from towline.rollout.rewards.mathematics.parser import parse, read_in_base
from towline.rollout.rewards.mathematics.tokens import COMMA_GROUPS, WORDS, Token, Unreadable, read_digits, tokenize
from towline.rollout.rewards.mathematics.typography import to_latex
from towline.rollout.rewards.mathematics.units import DEGREES, MONEY, PERCENT, SCALES, Unit, read_unit

MAX_CHARS = 20_000
MAX_CACHED_CHARS = 200
MAX_NESTING = 30
MAX_MEMBERS = 100
MAX_UNIT_WORDS = 6
MAX_WORDS = 3
"""More words outside `\\text{…}` are prose, not an answer."""
_POINTERS = frozenset({
    "see", "above", "below", "figure", "diagram", "graph", "picture", "vary", "varies", "refer", "proof", "n/a",
    "tbd", "unknown",
})  # fmt: skip

_PLAIN = re.compile(r"[-+]?(?:[0-9]{1,15}|[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?:\.[0-9]{1,15})?")
_SPACED_DIGITS = re.compile(r"[-+]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]+)?")
_ZERO_GROUP = re.compile(r",0[0-9]{2}(?![0-9])")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' .,\-/]*[?!.]*")
_ONE_TEXT = re.compile(r"\\(?:text(?:rm|bf|it|sf|normal)?|mathrm|mathbf|mbox|hbox)\s*\{([^{}]*)\}")
_OPTION = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s+)?\(?\s*([A-Za-z])\s*[).]?")
_BASED = re.compile(
    r"\(?([0-9A-Z]+)\)?\s*_\s*(?:\{\s*(?:\\text\s*\{\s*(?:base)?\s*)?([0-9]{1,2})\s*\}?\s*\}|([0-9]{1,2}))"
)
_TIME = re.compile(
    r"([01]?[0-9]|2[0-4]):([0-5][0-9])\s*(?:(?:\\text\{|\\mathrm\{|\\,)?\s*([AaPp])\.?\s?[Mm]\.?\s*\}?)?"
)
_MATHEMATICAL_WORDS = WORDS - {"and", "or"}
_REALS, _NOTHING = Region("reals", ()), Region("or", ())
_PHRASES = {
    **dict.fromkeys(("all real numbers", "all reals", "real numbers", "set of all real numbers"), _REALS),
    **dict.fromkeys(("no solution", "no solutions", "no real solution", "no real solutions", "empty set"), _NOTHING),
}
_UNIT = re.compile(r"[A-Za-z0-9 ./^\-]*")
_ARTICLE = re.compile(r"^(?:the|a|an) ")

_OPENINGS = frozenset({
    "(", "[", "{", "\\{", "langle", "lfloor", "lceil",
})  # fmt: skip
_CLOSINGS = frozenset({
    ")", "]", "}", "\\}", "rangle", "rfloor", "rceil",
})  # fmt: skip
_COMPARISONS = frozenset({"<", ">", "le", "ge"})
_RELATIONS = _COMPARISONS | {"=", "approx", "in", "ne"}
_SET_OPERATIONS = {"cup": "or", "cap": "and", "setminus": "minus"}
_FLIPPED = {"<": ">", ">": "<", "le": "ge", "ge": "le"}
_NAMING = frozenset({
    "(", ")", ",", "'", "_", "{", "}", "angle", "triangle", "|", "overline", "ell",
})  # fmt: skip
_TRIGONOMETRIC = frozenset({"sin", "cos", "tan", "cot", "sec", "csc"})
_GREEK_NAMES = frozenset({
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "kappa", "lambda", "mu", "nu", "xi", "rho",
    "sigma", "tau", "phi", "chi", "psi", "omega",
})  # fmt: skip

Tokens = Sequence[Token]


def read(text: str) -> tuple[Answer, ...]:
    """Every reading of an answer, the likeliest first; a single `NotRead` if there is none."""
    if len(text) > MAX_CHARS:
        return (NotRead(f"longer than {MAX_CHARS} characters", text.strip()),)
    return _read_cached(text) if len(text) <= MAX_CACHED_CHARS else _read(text)


def _read(text: str) -> tuple[Answer, ...]:
    if _PLAIN.fullmatch(text) and "," not in text:
        return (Value(parse(tokenize(text, groups_digits=False))),)
    latex = to_latex(text)
    if not latex:
        return (NotRead("empty"),)
    for reader in (_read_words, _read_special):
        readings = reader(latex)
        if readings is not None:
            return readings
    return _read_mathematics(latex)


_read_cached = lru_cache(maxsize=1024)(_read)


def _read_mathematics(latex: str) -> tuple[Answer, ...]:
    readings: list[Answer] = []
    problem = ""
    for groups_digits in _digit_groupings(latex):
        try:
            readings.append(_answer(tokenize(latex, groups_digits=groups_digits), 0))
        except Unreadable as error:
            problem = problem or str(error)
    return tuple(readings) or (NotRead(problem, "".join(latex.split())),)


def _digit_groupings(latex: str) -> tuple[bool, ...]:
    """Whether `1,234` may be one number, or two: within brackets only where other commas have a space after them."""
    if not COMMA_GROUPS.search(latex):
        return (False,)
    if _ZERO_GROUP.search(latex):
        return (True,)
    is_bracketed = latex.lstrip("\\").startswith(("(", "[", "{", "langle"))
    return (True, False) if not is_bracketed or re.search(r",\s", latex) else (False,)


def _read_words(latex: str) -> tuple[Answer, ...] | None:
    """Words in `\\text{…}`, or bare ones; None for anything else."""
    written = _ONE_TEXT.fullmatch(latex)
    if written is not None:
        content = written[1].strip()
        if not content:
            return (NotRead("empty"),)
        if any(character.isdigit() for character in content) or _OPTION.fullmatch(content):
            return _read(content)
        words = _words(content, is_bare=False)
        meaning = _PHRASES.get(words.words) if isinstance(words, Words) else None
        return (words,) if meaning is None else (words, meaning)
    if not _WORDS.fullmatch(latex) or _OPTION.fullmatch(latex):
        return None
    words = _words(latex, is_bare=True)
    if isinstance(words, Words) and words.is_prose:
        return (words,)
    plain = set(re.findall("[A-Za-z]+", latex))
    meaning = _PHRASES.get(words.words) if isinstance(words, Words) else None
    if meaning is not None:
        return (words, meaning)
    if max(map(len, plain)) > 3 and "/" not in latex and plain.isdisjoint(_MATHEMATICAL_WORDS):
        return (words,)
    return (*_only_read(latex), words)


def _words(text: str, *, is_bare: bool) -> Answer:
    """One answer in words, or a list of them: `Alice and Bob`."""
    pieces = [piece for piece in re.split(r"[,;]|\b(?:and|or)\b", text) if piece.strip()]
    is_prose = is_bare and any(_is_prose(piece) for piece in pieces)
    if len(pieces) < 2 or is_prose:
        return Words(_canonical(text), is_prose=is_prose)
    letters = [_OPTION.fullmatch(piece.strip()) for piece in pieces]
    return Members(
        tuple(
            Value(Name(letter[1])) if letter else Words(_canonical(piece))
            for piece, letter in zip(pieces, letters, strict=True)
        )
    )


def _only_read(latex: str) -> tuple[Answer, ...]:
    return tuple(reading for reading in _read_mathematics(latex) if not isinstance(reading, NotRead))


def _canonical(words: str) -> str:
    return _ARTICLE.sub("", " ".join(words.split()).strip(" .,;:!?'\"").casefold())


def _is_prose(text: str) -> bool:
    words = text.casefold().strip(" .?!").split()
    return len(words) > MAX_WORDS or not _POINTERS.isdisjoint(words)


def _read_special(latex: str) -> tuple[Answer, ...] | None:
    """Forms that are read as a whole: options, numbers to another base, times of day, digits grouped by spaces."""
    option = _OPTION.fullmatch(latex)
    if option is not None and len(latex) > 1:
        return (Value(Name(option[1])),)
    based = _BASED.fullmatch(latex)
    if based is not None and (based[1][0].isdigit() or len(based[1]) > 1):
        try:
            value = read_in_base(based[1], int(based[2] or based[3]))
        except Unreadable as error:
            return (NotRead(str(error), latex.replace(" ", "")),)
        digits = integer(read_digits(based[1])).value if based[1].isdecimal() else None
        return (Value(integer(value), digits=digits),)
    time = _TIME.fullmatch(latex)
    if time is not None:
        name = f"{int(time[1])}:{time[2]}" + (f" {time[3].lower()}m" if time[3] else "")
        return (Ratio((integer(int(time[1])), integer(int(time[2]))), time=name),)
    if _SPACED_DIGITS.fullmatch(latex):
        return _read(latex.replace(" ", ""))
    return None


def _answer(tokens: Tokens, nesting: int) -> Answer:
    if nesting > MAX_NESTING:
        raise Unreadable(f"nested deeper than {MAX_NESTING} levels")
    if not tokens:
        raise Unreadable("empty")
    while _is_group(tokens, ("{",)) and not _separators(tokens[1:-1], 0):
        tokens = tokens[1:-1]
        if not tokens:
            raise Unreadable("empty")
    if all(token.kind == "text" for token in tokens):
        return Words(_canonical(" ".join(token.text for token in tokens)))
    separators = _separators(tokens, 0)
    if separators:
        return _members_or_region(tokens, separators, nesting)
    return _single(tokens, nesting)


def _single(tokens: Tokens, nesting: int) -> Answer:
    depths = _depths(tokens)
    operations = _at_top(tokens, depths, _SET_OPERATIONS.__contains__)
    relations = _at_top(tokens, depths, _RELATIONS.__contains__)
    if relations:
        return _relation(tokens, relations, nesting)
    if operations:
        return _set_operations(tokens, operations, nesting)
    if len(tokens) == 1 and tokens[0].text in ("mathbb R", "emptyset"):
        return _NOTHING if tokens[0].text == "emptyset" else _REALS
    colons = _at_top(tokens, depths, (":",).__contains__)
    if colons:
        return _ratio(tokens, colons)
    if _is_group(tokens, _OPENINGS):
        collection = _collection(tokens, nesting)
        if collection is not None:
            return collection
    if any(token.kind == "begin" for token in tokens):
        return _matrix(tokens)
    return _value(tokens)


def _depths(tokens: Tokens) -> list[int]:
    """How many brackets are open before each token. Any bracket closes any other, as intervals want it."""
    depths: list[int] = []
    depth = 0
    for token in tokens:
        is_symbol = token.kind == "symbol"
        if token.kind == "end" or (is_symbol and token.text in _CLOSINGS):
            depth -= 1
        depths.append(depth)
        if token.kind == "begin" or (is_symbol and token.text in _OPENINGS):
            depth += 1
    if depth or min(depths, default=0) < 0:
        raise Unreadable("brackets that do not match")
    return depths


def _at_top(tokens: Tokens, depths: list[int], is_wanted: Callable[[str], bool]) -> list[int]:
    return [
        index
        for index, token in enumerate(tokens)
        if depths[index] == 0 and token.kind in ("symbol", "word") and is_wanted(token.text)
    ]


def _separators(tokens: Tokens, depth: int) -> list[int]:
    depths = _depths(tokens)
    return [
        index
        for index, token in enumerate(tokens)
        if depths[index] == depth and token.kind in ("symbol", "word") and token.text in (",", ";", "and", "or")
    ]


def _is_group(tokens: Tokens, openings) -> bool:
    if len(tokens) < 2 or tokens[0].kind != "symbol" or tokens[0].text not in openings:
        return False
    return all(depth > 0 for depth in _depths(tokens)[1:-1]) and tokens[-1].text in _CLOSINGS


def _split(tokens: Tokens, positions: list[int]) -> list[Tokens]:
    if len(positions) >= MAX_MEMBERS:
        raise Unreadable(f"more than {MAX_MEMBERS} members")
    edges = [-1, *positions, len(tokens)]
    return [tokens[start + 1 : end] for start, end in pairwise(edges)]


def _members_or_region(tokens: Tokens, separators: list[int], nesting: int) -> Answer:
    """`1, 2 and 3`: a list; `x < 1 or x > 5`: a region; `k = 5, 6`: k has two values."""
    pieces = [piece for piece in _split(tokens, separators) if piece]
    if not pieces:
        raise Unreadable("separators alone")
    if not tokens[separators[0] :][0].text or tokens[0].text in (",", ";") or tokens[-1].text in (",", ";"):
        raise Unreadable("a separator at the end")
    members = _flat([_answer(piece, nesting + 1) for piece in pieces])
    connectives = {tokens[index].text for index in separators}
    regions = [member.value if isinstance(member, Assignment) else member for member in members]
    if all(isinstance(region, Bounds | Region) for region in regions):
        return Region("or" if "or" in connectives else "and" if "and" in connectives else "list", tuple(regions))
    first = members[0]
    if isinstance(first, Assignment):
        if all(isinstance(member, Value) for member in members[1:]):
            return Assignment(first.name, _list_of([first.value, *members[1:]]))
        if all(isinstance(member, Assignment) and member.name == first.name for member in members):
            return Assignment(first.name, _list_of([m.value for m in members if isinstance(m, Assignment)]))
    return _list_of(members)


def _list_of(members: list[Answer]) -> Answer:
    members = _flat(members)
    return members[0] if len(members) == 1 else Members(tuple(members))


def _flat(members: list[Answer]) -> list[Answer]:
    r"""`1 \pm 2` is two members of the list it stands in."""
    flat: list[Answer] = []
    for member in members:
        flat += member.members if isinstance(member, Members) and not member.opening else [member]
    return flat


def _relation(tokens: Tokens, positions: list[int], nesting: int) -> Answer:
    signs = ["=" if tokens[index].text == "approx" else tokens[index].text for index in positions]
    sides = _split(tokens, positions)
    if not sides[0]:
        if signs != ["="]:
            raise Unreadable("a relation without a left side")
        return _answer(sides[1], nesting + 1)
    if signs == ["="] or signs == ["in"]:
        return _assignment_or_equation(sides[0], sides[1], nesting, is_equation=signs == ["="])
    if set(signs) == {"="}:
        return _chain_of_equals(sides, nesting)
    if signs == ["ne"]:
        name = parse(sides[0])
        if not isinstance(name, Name):
            raise Unreadable("an inequation that is not solved")
        value = parse(sides[1])
        return Region("minus", (_REALS, Bounds(name.name, value, value, True, True)))
    if set(signs) <= _COMPARISONS:
        return _inequality([parse(side) for side in sides], signs)
    raise Unreadable("several kinds of relations in one")


def _assignment_or_equation(left: Tokens, right: Tokens, nesting: int, *, is_equation: bool) -> Answer:
    if not right:
        raise Unreadable("an equation without a right side")
    if is_equation and not _is_name(left) and _is_name(right) and len(right) == 1:
        left, right = right, left
    equation = _equation(left, right) if is_equation else None
    if _is_name(left):
        return Assignment(" ".join(token.text for token in left), _answer(right, nesting + 1), equation)
    if equation is None:
        raise Unreadable("a relation that is not read")
    return equation


def _equation(left: Tokens, right: Tokens) -> Equation | None:
    try:
        sides = parse(left), parse(right)
    except Unreadable:
        return None
    return None if has_sign_choice(sides[0]) or has_sign_choice(sides[1]) else Equation(*sides)


def _is_name(tokens: Tokens) -> bool:
    """A variable, `f(x)`, `P(A)`, `AB`, `(x, y)`, `\\angle ABC`, `\\text{area}`: no numbers and no operations."""
    texts = [token.text for token in tokens]
    if texts[1:6] == ["^", "{", "-", "1", "}"]:  # an inverse function
        tokens = [tokens[0], *tokens[6:]]
    has_letter = False
    for index, token in enumerate(tokens):
        is_index = index > 0 and tokens[index - 1].text in ("_", "{")
        if token.kind in ("letter", "text") or token.text in _GREEK_NAMES:
            has_letter = True
        elif not (token.text in _NAMING or token.text in _TRIGONOMETRIC or (token.kind == "number" and is_index)):
            return False
    return has_letter


def _chain_of_equals(sides: list[Tokens], nesting: int) -> Answer:
    """`x = 2 + 3 = 5`: the name on the left has the value at the end."""
    if not _is_name(sides[0]):
        raise Unreadable("several equations in one")
    steps = tuple(_answer(side, nesting + 1) for side in sides[1:])
    return Assignment(" ".join(token.text for token in sides[0]), Steps(steps))


def _inequality(sides: list[Expression], signs: list[str]) -> Answer:
    if signs[0] in (">", "ge"):
        sides, signs = sides[::-1], [_FLIPPED[sign] for sign in reversed(signs)]
    if any(sign in (">", "ge") for sign in signs):
        raise Unreadable("an inequality in two directions")
    if len(sides) == 3 and isinstance(sides[1], Name) and not variables(sides[0]) and not variables(sides[2]):
        return Bounds(sides[1].name, sides[0], sides[2], signs[0] == "le", signs[1] == "le")
    if len(sides) > 2:
        raise Unreadable("an inequality that is not solved")
    low, high = sides
    if isinstance(low, Name) and variables(low) and not variables(high):
        return Bounds(low.name, MINUS_INFINITY, high, False, signs[0] == "le")
    if isinstance(high, Name) and variables(high) and not variables(low):
        return Bounds(high.name, low, INFINITY, signs[0] == "le", False)
    return Inequality(difference(high, low), is_strict=signs[0] == "<")


def _set_operations(tokens: Tokens, positions: list[int], nesting: int) -> Answer:
    signs = {_SET_OPERATIONS[tokens[index].text] for index in positions}
    if len(signs) > 1:
        raise Unreadable("several set operations without brackets")
    return Region(signs.pop(), tuple(_answer(part, nesting + 1) for part in _split(tokens, positions)))


def _ratio(tokens: Tokens, colons: list[int]) -> Answer:
    return Ratio(tuple(parse(term) for term in _split(tokens, colons)))


def _collection(tokens: Tokens, nesting: int) -> Answer | None:
    """A tuple, an interval or a set; None for a bracketed value."""
    opening, closing = tokens[0].text.removeprefix("\\"), tokens[-1].text.removeprefix("\\")
    inside = tokens[1:-1]
    is_set = opening == "{"
    if opening in ("lfloor", "lceil"):
        return None
    if is_set:
        if not inside:
            return _NOTHING
        built = _at_top(inside, _depths(inside), ("mid", "|", ":").__contains__)
        if built:
            return _answer(inside[built[0] + 1 :], nesting + 1)
    if not inside:
        raise Unreadable("empty brackets")
    separators = _at_top(inside, _depths(inside), (",", ";").__contains__)
    if not separators and not is_set:
        return _matrix(inside) if inside[0].kind == "begin" else None
    members = [_answer(piece, nesting + 1) for piece in _split(inside, separators)]
    if is_set:
        return Members(tuple(_flat(members)), "{", "}")
    if opening == "langle":
        opening, closing = "(", ")"
    return Members(tuple(members), opening, closing)


def _matrix(tokens: Tokens) -> Matrix:
    start = next(index for index, token in enumerate(tokens) if token.kind == "begin")
    name = tokens[start].text
    if tokens[-1].kind != "end" or name not in ("pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix", "array"):
        raise Unreadable(f"the environment {name!r} here")
    body = tokens[start + 1 : -1]
    rows = [row for row in _split(body, [i for i, token in enumerate(body) if token.text == "\\\\"]) if row]
    cells = [[parse(cell) for cell in _split(row, [i for i, t in enumerate(row) if t.text == "&"])] for row in rows]
    if not cells or len({len(row) for row in cells}) > 1:
        raise Unreadable("a matrix with rows of different lengths")
    factor = _factor_before(tokens[:start])
    if factor is not None:
        cells = [[Apply("*", (factor, cell)) for cell in row] for row in cells]
    return Matrix(tuple(tuple(row) for row in cells))


def _factor_before(tokens: Tokens) -> Expression | None:
    if tokens and tokens[-1].text in ("(", "["):
        raise Unreadable("a matrix within brackets")
    if tokens and tokens[-1].text == "*":
        tokens = tokens[:-1]
    if not tokens:
        return None
    return integer(-1) if [token.text for token in tokens] == ["-"] else parse(tokens)


def _value(tokens: Tokens) -> Answer:
    tokens, has_currency = _without_currency(tokens)
    tokens, unit_text = _without_unit(tokens)
    is_percent = False
    while tokens and tokens[-1].text == "%":
        tokens, is_percent = tokens[:-1], True
    if unit_text in PERCENT:
        unit_text, is_percent = "", True
    scale, unit_text = _scale(unit_text)
    expression = parse(tokens)
    unit: Unit | None = MONEY if has_currency else read_unit(unit_text) if unit_text else None
    if isinstance(expression, Apply) and expression.operation == "degrees":
        expression = expression.arguments[0]
        unit = unit or DEGREES
    if scale != 1:
        expression = Apply("*", (integer(scale), expression))
    if has_sign_choice(expression):
        both = [Value(choose_sign(expression, sign), unit, is_percent) for sign in (1, -1)]
        return Members(tuple(both))
    return Value(expression, unit, is_percent)


def _without_currency(tokens: Tokens) -> tuple[Tokens, bool]:
    index = 1 if tokens[0].text in ("-", "+") else 0
    if len(tokens) > 1 and tokens[-1].text == "$":
        return tokens[:-1], True
    if len(tokens) > index + 1 and tokens[index].text == "$":
        return [*tokens[:index], *tokens[index + 1 :]], True
    return tokens, False


def _without_unit(tokens: Tokens) -> tuple[Tokens, str]:
    """Split off the words after a value, with the powers and slashes among them."""
    start = next((index for index, token in enumerate(tokens) if token.kind == "text"), None)
    if start is None:
        return tokens, ""
    if start == 0:
        raise Unreadable("words before a value")
    pieces: list[str] = []
    for token in tokens[start:]:
        if token.kind not in ("text", "number") and token.text not in ("^", "/", "*", "{", "}", "-", "circ"):
            raise Unreadable("words within a value")
        pieces.append(token.text if token.text in ("^", "/") or token.kind == "number" else f" {token.text}")
    unit = re.sub(r"[{}* ]+", " ", "".join(pieces)).replace("^ ", "^").strip()
    if re.search(
        r"\b(?:and|or|less|more|than|base|if|when|where|not|plus|minus|times|over|to|is|are|was|no|wrong)\b", unit
    ):
        raise Unreadable(f"the words {unit[:40]!r} after a value")
    if unit.count(" ") >= MAX_UNIT_WORDS or not _UNIT.fullmatch(unit):
        raise Unreadable("more than a unit after a value")
    if re.search(r"(?<!\^)(?<!\^-)[0-9]", unit):
        raise Unreadable("numbers among the words after a value")
    return tokens[:start], unit


def _scale(unit: str) -> tuple[int, str]:
    first, _, rest = unit.partition(" ")
    return (SCALES[first.lower()], rest) if first.lower() in SCALES else (1, unit)
