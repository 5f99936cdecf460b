"""Tokens and passwords of a recipe are kept in files of the user's own only; everywhere else a reference stands."""

import os
import stat
from pathlib import Path

import pytest
import yaml

import autofit
from autofit.errors import ConfigError, EnvironmentFault
from autofit.files import cache_folder
from autofit.recipe.secrets import opened, sealed

TOKEN, KEY, PASSWORD = "hf_" + "t" * 30, "not-by-its-look-0123456789", "p4ssw0rd-in-a-url"
GIVEN = {
    "hub_token": TOKEN, "env": {"WANDB_API_KEY": KEY, "OMP_NUM_THREADS": 1}, "lora_r": 8, "token": None,
    "model_init_kwargs": {"token": TOKEN, "max_memory": {0: "1GB"}}, "note": f"https://me:{PASSWORD}@host/x",
    "reward_funcs": ["a.b"], "pad_token": "<pad>",
}  # fmt: skip


def test_every_secret_becomes_a_reference_and_comes_back() -> None:
    found = sealed(GIVEN)
    assert not [secret for secret in (TOKEN, KEY, PASSWORD) if secret in repr(found)]
    assert sealed(found) == found == sealed(GIVEN)  # a kept study is found again by its values
    kept = ("lora_r", "token", "reward_funcs", "pad_token")
    assert {key: found[key] for key in kept} == {key: GIVEN[key] for key in kept}
    assert opened(found) == GIVEN


def test_the_files_are_the_users_own() -> None:
    sealed(GIVEN)
    folder = cache_folder() / "secrets"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert all(TOKEN not in path.name for path in folder.iterdir())


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path))
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "secrets").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentFault, match="only you can enter"):
        sealed(GIVEN)
    (tmp_path / "secrets").unlink()
    (tmp_path / "secrets").mkdir(mode=0o755)
    with pytest.raises(EnvironmentFault, match="chmod 700"):
        sealed(GIVEN)


def test_a_secret_that_is_gone_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sealed(GIVEN)
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="no longer kept on this machine"):
        opened(found)


@pytest.mark.slow
def test_no_file_of_a_search_and_its_full_run_holds_a_secret_but_the_tuned_yaml(tiny_recipe: Path) -> None:
    values = yaml.safe_load(tiny_recipe.read_text())
    values |= {"hub_token": TOKEN, "env": {**values.get("env", {}), "WANDB_API_KEY": KEY}}
    folder = Path("studies")
    found = autofit.search(values, name="tiny", device="cpu", target_vram="3GB", trials=1, folder=folder)
    assert found.winner is not None
    done = autofit.promote("best", folder=folder)
    assert done.status == "done"
    assert yaml.safe_load(done.yaml_path.read_text())["hub_token"] == TOKEN  # as the user wrote it there
    assert stat.S_IMODE(done.yaml_path.stat().st_mode) == 0o600
    output = Path(values["output_dir"])
    files = [path for home in (folder, output) for path in home.rglob("*") if path.is_file() and path != done.yaml_path]
    assert len([path for path in files if path.is_relative_to(folder)]) > 20
    assert {path.name for path in files} >= {"studies.db", "probe.log", "training_args.bin"}
    with_secrets = [path for path in files if any(s.encode() in path.read_bytes() for s in (TOKEN, KEY))]
    assert with_secrets == []
    assert TOKEN not in repr(os.environ)
