"""How far a scoring is: a bar on a terminal, else nothing."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


@contextmanager
def bar(what: str, total: float) -> Generator[Callable[[float], None]]:
    """Yield a function that takes how much of `total` is done. The bar goes to stderr and is taken away at the end."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)
