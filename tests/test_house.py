"""The layout promised in docs/adr/0001: five real folders, one import name, nothing heavy on the ground floor."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["storage", "rollout", "trainer", "jobs", "launcher"]
HEAVY = ["torch", "vllm", "deepspeed", "transformers", "mpi4py"]
JOBS_WITHOUT_TORCH = ["experiment", "supervisor", "launch", "deadline"]


def run_python(code: str, folder: Path) -> str:
    """Run code with the installed towline only: neither the folder of the script nor PYTHONPATH is on the path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def git(*arguments: str) -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return listing.stdout.splitlines()


def test_every_room_is_a_link_to_its_real_folder() -> None:
    links = {path.name: path for path in (ROOT / "src/towline").iterdir() if path.is_symlink()}
    assert set(ROOMS) <= set(links)
    for link in links.values():
        assert not link.readlink().is_absolute()
        assert link.resolve().is_dir()
        assert link.resolve().is_relative_to(ROOT)
        assert (ROOT / link.name).resolve() == link.resolve() or link.name not in ROOMS


def test_links_are_committed_as_links() -> None:
    modes = {line.split("\t")[1]: line.split()[0] for line in git("ls-files", "--stage", "src/towline")}
    for room in ROOMS:
        assert modes[f"src/towline/{room}"] == "120000"


def test_rooms_are_importable_only_under_towline(tmp_path: Path) -> None:
    code = f"""
from importlib.util import find_spec
print([name for name in {ROOMS} if find_spec(name)], find_spec("towline.storage").name)
"""
    assert run_python(code, tmp_path) == "[] towline.storage\n"


def modules_without_torch() -> Iterator[str]:
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        module = path.relative_to(ROOT).with_suffix("")
        light_room = module.parts[0] in ("storage", "launcher")
        light_job = module.parts[0] == "jobs" and module.name in JOBS_WITHOUT_TORCH
        if (light_room or light_job or module.name in ("__init__", "config")) and module.name != "__main__":
            yield ".".join(("towline", *module.parts)).removesuffix(".__init__")


def test_ground_floor_imports_no_torch(tmp_path: Path) -> None:
    modules = list(modules_without_torch())
    assert "towline.storage.errors" in modules
    code = f"""
import importlib, sys
for name in {modules}:
    importlib.import_module(name)
    if found := [heavy for heavy in {HEAVY} if heavy in sys.modules]:
        sys.exit(f"{{name}} imports {{', '.join(found)}}")
"""
    run_python(code, tmp_path)


@pytest.mark.slow
def test_wheel_contains_the_rooms_under_towline(tmp_path: Path) -> None:
    """Through the build backend itself, as pip does: an environment made by uv has no pip."""
    source = tmp_path / "source"
    for name in [*ROOMS, "src", "env"]:
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
        )
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    run_python(f"import setuptools.build_meta as backend; backend.build_wheel({str(tmp_path)!r})", source)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"{room}/{path.name}" for room in ROOMS for path in (ROOT / room).glob("*.py")}
    prompts = {f"jobs/experiments/prompts/{path.name}" for path in (ROOT / "jobs/experiments/prompts").glob("*.txt")}
    assert {f"towline/{name}" for name in expected | prompts | {"py.typed"}} <= names
    assert not {name for name in names if name.split("/")[0] in ROOMS}


def markdown_files() -> list[Path]:
    return [ROOT / name for name in git("ls-files", "--cached", "--others", "--exclude-standard", "*.md")]


def without_code_blocks(page: Path) -> str:
    return re.sub(r"^(```+).*?^\1", "", page.read_text(), flags=re.M | re.S)


def link_targets(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", without_code_blocks(page))
    return [target for target in re.findall(r"\]\(<?([^)\s>]+)", text) if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The names that headings get as link targets on GitHub."""
    headings = re.findall(r"^#+ +(.+?) *$", without_code_blocks(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def resolves(target: str, page: Path) -> bool:
    name, _, anchor = target.partition("#")
    found = page.parent / name if name else page
    return found.exists() and (not anchor or found.suffix != ".md" or anchor in anchors(found))


def test_markdown_links_resolve() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in markdown_files()
        for target in link_targets(page)
        if not resolves(target, page)
    ]
    assert not broken
