"""Whether the rewards of an experiment exist. A user's file is parsed, not imported: its code runs in scorers only."""

import ast
import difflib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from towline.launcher.experiment_file import ExperimentFile
from towline.rollout.rewards.config import REWARD_MODEL, TOKEN_COUNTERS, RewardConfig
from towline.rollout.rewards.mixture import BUILT_IN

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def located_problems(file: ExperimentFile, rewards: Sequence[RewardConfig]) -> Iterator[str]:
    for number, problem in enumerate(reward_problems(rewards)):
        if problem is not None:
            end = "" if problem.endswith((".", "?")) else "."
            yield f"{file.where(f'rewards.{number}.use')}: rewards.use: {problem}{end}"


def reward_problems(rewards: Sequence[RewardConfig]) -> list[str | None]:
    """For each reward, what is wrong with it, or None."""
    return [_use_problem(reward.use) for reward in rewards]


def _use_problem(use: str) -> str | None:
    script, colon, function = use.rpartition(":")
    if not colon:
        known = (*BUILT_IN, *TOKEN_COUNTERS, REWARD_MODEL)
        if use in known:
            return None
        return f"{use} is not a built-in reward.{_choices(use, known)} Your own is written as FILE.py:FUNCTION"
    return _script_problem(Path(script), function)


def _script_problem(path: Path, function: str) -> str | None:
    if path.suffix != ".py" or not path.is_file():
        return f"there is no Python file {path}; its path is relative to the experiment file"
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        return f"{path}:{error.lineno}: {error.msg}"
    defined = dict(_definitions(tree.body))
    if function not in defined:
        # `from x import *` may bring any name.
        return None if "*" in defined else f"{path} has no function {function}.{_choices(function, defined)}"
    return _signature_problem(path, defined[function])


def _definitions(statements: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names that a module's top level gives, with the statement that does; also below `if` and `try`."""
    for statement in statements:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name, statement
            case ast.Import() | ast.ImportFrom():
                for alias in statement.names:
                    yield alias.asname or alias.name.partition(".")[0], statement
            case ast.Assign() | ast.AnnAssign():
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for node in (node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)):
                    yield node.id, statement
            case _:
                blocks = (getattr(statement, name, []) for name in ("body", "orelse", "finalbody"))
                handlers: list[ast.ExceptHandler] = getattr(statement, "handlers", [])
                for block in (*blocks, *(handler.body for handler in handlers)):
                    yield from _definitions(block)


def _signature_problem(path: Path, definition: ast.stmt) -> str | None:
    if not isinstance(definition, _Function):
        return None
    where = f"{path}:{definition.lineno}: {definition.name}"
    if isinstance(definition, ast.AsyncFunctionDef):
        return f"{where} is async; expected a plain function of (completion, gold)"
    arguments = definition.args
    num_positional = len(arguments.posonlyargs) + len(arguments.args)
    num_required = num_positional - len(arguments.defaults)
    takes_two = num_required <= 2 and (num_positional >= 2 or arguments.vararg is not None)
    if not takes_two or any(default is None for default in arguments.kw_defaults):
        return f"{where} must take (completion, gold)"
    return None


def _choices(wanted: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(wanted, names, n=1)
    return f" Did you mean {near[0]}?" if near else f" Known: {', '.join(names) or 'none'}."
