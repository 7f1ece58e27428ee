"""Where a cluster profile is looked for, and what is said of one that is wrong."""

from pathlib import Path

import pytest

from towline.launcher.profile_file import find_profile, known_profiles, load_profile
from towline.storage.errors import ConfigError, InputError


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The folders that are searched, in order; what is shipped comes last."""
    found = {name: tmp_path / name for name in ("here", "named", "other", "home")}
    for folder in found.values():
        folder.mkdir()
    (found["home"] / ".config" / "towline").mkdir(parents=True)
    monkeypatch.chdir(found["here"])
    monkeypatch.setenv("TOWLINE_CLUSTERS", f"{found['named']}::{found['other']}")
    monkeypatch.setenv("HOME", str(found["home"]))
    return found | {"home": found["home"] / ".config" / "towline"}


def write(folder: Path, text: str = "", name: str = "dev") -> Path:
    (folder / f"{name}.toml").write_text(f'name = "{folder.name}"\n{text}')
    return folder / f"{name}.toml"


def test_the_nearest_folder_wins(places: dict[str, Path]) -> None:
    assert load_profile("dev").name == "dev"
    for place in ("home", "other", "named", "here"):
        write(places[place])
        assert load_profile("dev").name == places[place].name


def test_a_file_is_named_by_its_path(places: dict[str, Path]) -> None:
    path = write(places["other"], name="mine")
    assert load_profile(str(path)).name == "other"
    write(places["here"], name="beside")
    assert load_profile("beside.toml").name == "here"
    with pytest.raises(InputError, match=r"--cluster away\.toml: no such file"):
        load_profile("away.toml")


def test_the_environment_names_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOWLINE_CLUSTER", "dev")
    assert load_profile(None).name == "dev"
    assert load_profile("template").name == "template"


def test_without_a_name_the_known_ones_are_listed(places: dict[str, Path]) -> None:
    write(places["named"], name="ours")
    with pytest.raises(InputError, match=r"set TOWLINE_CLUSTER\. Known: ours, a100-modules, dev"):
        load_profile(None)


def test_the_nearest_name_is_proposed(places: dict[str, Path]) -> None:
    write(places["named"], name="juniper")
    with pytest.raises(InputError, match=r"no junipr\.toml in .*\. Did you mean juniper\?"):
        find_profile("junipr")
    with pytest.raises(InputError, match=r"no zzz\.toml in .*\. Known: juniper, a100-modules"):
        find_profile("zzz")


def test_an_experiment_in_the_working_folder_is_no_profile(places: dict[str, Path]) -> None:
    experiment = 'objective = "grpo"\nsteps = 3\n'
    (places["here"] / "dev.toml").write_text(experiment)
    (places["here"] / "sort.toml").write_text(experiment)
    assert load_profile("dev").name == "dev"
    assert "sort" not in known_profiles()
    with pytest.raises(InputError, match=r"no sort\.toml"):
        find_profile("sort")


def test_a_name_that_two_folders_have_is_listed_once(places: dict[str, Path]) -> None:
    write(places["here"])
    assert known_profiles().count("dev") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('layuot = "het"\n', r"dev\.toml:2: layuot is not a field\. Did you mean layout\?"),
        ("[folders]\nrun = 1\n", r"dev\.toml:3: folders\.run is not a field\. Did you mean runs\?"),
        ('layout = "both"\n', r"dev\.toml:2: layout: .*'het', 'single' or 'auto' \(found 'both'\)"),
        ("[trainer]\nsbatch = { nodes = 2 }\n", r"dev\.toml:3: .*nodes follows from the experiment's \[nodes\]"),
        ('[trainer]\n\nsbatch = { "--time" = 2 }\n', r'dev\.toml:4: .*without dashes: "time"'),
        ("[software.env]\nNCCL_CROSS_NIC = 1\n", r"dev\.toml:3: software\.env\.NCCL_CROSS_NIC: .*string \(found 1\)"),
        ("layout =\n", r"dev\.toml:2: not valid TOML"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(places: dict[str, Path], text: str, message: str) -> None:
    write(places["here"], text)
    with pytest.raises(ConfigError, match=message):
        load_profile("dev")


def test_every_problem_of_a_file_is_told_at_once(places: dict[str, Path]) -> None:
    write(places["here"], 'layuot = "het"\nmpi = "a b"\n')
    with pytest.raises(ConfigError, match=r"dev\.toml:2: layuot[^\n]*\n.*|dev\.toml:3: mpi") as caught:
        load_profile("dev")
    assert len(str(caught.value).splitlines()) == 2


def test_a_file_that_is_not_text_is_said_to_be_none(places: dict[str, Path]) -> None:
    (places["here"] / "dev.toml").write_bytes(b'name = "\xff"\n')
    with pytest.raises(ConfigError, match=r"dev\.toml:1: not UTF-8"):
        load_profile("dev")
