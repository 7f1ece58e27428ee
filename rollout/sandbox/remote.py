"""What tests hold in place of a function, class or object of the program."""

from collections.abc import Callable
from typing import Any

Ask = Callable[["Remote", str, tuple[Any, ...], dict[str, Any]], Any]


class Remote:
    """It can be called, iterated, indexed, and asked for attributes, length, text and truth; each answer is a plain
    value or again a Remote. It takes part in no comparison and no arithmetic: what `==` says of an object of the
    program's is up to the program."""

    def __init__(self, ask: Ask, number: int) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask(self, "call", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask(self, "attribute", (name,), {})

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask(self, "set_attribute", (name, value), {})

    def __iter__(self) -> Any:
        return self._ask(self, "iter", (), {})

    def __next__(self) -> Any:
        return self._ask(self, "next", (), {})

    def __len__(self) -> int:
        return self._exactly(int, "len")

    def __getitem__(self, key: Any) -> Any:
        return self._ask(self, "item", (key,), {})

    def __bool__(self) -> bool:
        return self._exactly(bool, "bool")

    def __str__(self) -> str:
        return self._exactly(str, "str")

    def __repr__(self) -> str:
        return self._exactly(str, "repr")

    def _exactly(self, kind: type, what: str) -> Any:
        value = self._ask(self, what, (), {})
        if type(value) is not kind:
            raise TypeError(f"{what}() of an object of the program gave no {kind.__name__}")
        return value

    def _no_operator(self, other: object) -> Any:
        if other is self:
            return True
        raise TypeError("an object of the program is compared; only plain values are")

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _no_operator

    def __ne__(self, other: object) -> bool:
        return not self._no_operator(other)

    __hash__ = object.__hash__
