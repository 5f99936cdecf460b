"""Tokens and passwords of a recipe are kept in files of the user's own only; everywhere else a reference stands."""

import json
import os
import stat
from pathlib import Path

import command_line
import optuna
import pytest
import yaml

import autofit
from autofit.cli import main
from autofit.errors import ConfigError, EnvironmentFault
from autofit.files import cache_folder
from autofit.frontends.writing import OwnFile, source_of
from autofit.recipe.secrets import opened, opened_text, sealed, sealed_text, without_secrets
from autofit.tuning.record import sealed_file
from autofit.tuning.study import load_study, open_storage

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


def test_secrets_in_the_text_of_a_file_become_references_and_come_back() -> None:
    text = f"""hub_token: a&b$c  # mine
hf_hub_token: null
wandb_api_key: "two words"
pad_token: <pad>
export WANDB_API_KEY={KEY}; swift sft --flag --hf_hub_token \\
  {KEY} --hub_token $HF --password '{KEY}' --other {{token: {KEY}, lora_r: 8}}
# {TOKEN} https://me:{PASSWORD}@host
hub_token:
lora_r: 8
"""
    found = sealed_text(text)
    assert not [secret for secret in (TOKEN, KEY, PASSWORD, "a&b", "$c  #", "two words") if secret in found]
    for line in ("hf_hub_token: null", "pad_token: <pad>", "--hub_token $HF", "hub_token:\nlora_r: 8", "lora_r: 8}"):
        assert line in found
    assert sealed_text(found) == found
    assert opened_text(found) == text


def test_the_file_of_another_tool_is_kept_without_its_secrets_and_written_with_them(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"""base_model: Qwen/Qwen3-4B
datasets: [{{path: a}}]
adapter: lora
lora_r: 8  # mine
lora_alpha: 16
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 2
hub_token: {TOKEN}
""")
    kept = sealed_file(source_of(path).foreign)
    assert TOKEN not in repr(kept)
    assert OwnFile.of(kept, {"lora_r": 4}).text == path.read_text().replace("lora_r: 8", "lora_r: 4")


def test_a_study_of_an_earlier_autofit_is_rid_of_the_secrets_of_another_tools_file_when_it_is_opened(
    tmp_path: Path,
) -> None:
    storage = open_storage(tmp_path, create=True)
    made = optuna.create_study(study_name="run", storage=storage, directions=["minimize", "minimize"])
    text = f"base_model: m\nhub_token: {TOKEN}\n"
    for name, value in {"trainer": "hf", "foreign": {"tool": "Axolotl", "path": "run.yaml", "text": text}}.items():
        made.set_user_attr(name, value)
    origin = load_study(tmp_path, None).user_attrs["foreign"]
    assert TOKEN not in repr(optuna.load_study(study_name="run", storage=open_storage(tmp_path)).user_attrs)
    assert opened_text(origin["text"]) == text
    assert origin["path"] == "run.yaml"


# 24 kinds, as they stand in recipes; none may be read in anything that autofit keeps.
KINDS = {
    "HF_TOKEN": "hf_" + "a" * 34, "GITHUB_TOKEN": "0123456789abcdef" * 2, "GH_PAT": "ghp_" + "b" * 36,
    "GH_FINE": "github_pat_" + "c" * 40, "GH_APP": "ghs_" + "c" * 36, "GL_TOKEN": "glpat-" + "d" * 20,
    "OPENAI_API_KEY": "sk-" + "e" * 40, "AWS_ACCESS_KEY_ID": "AKIA" + "F" * 16,
    "AWS_SECRET_ACCESS_KEY": "wJalr/XUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "AUTH_HEADER": "Bearer abcdefgh.12345678",
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "SSH_PASSPHRASE": "correct horse battery",
    "DATABASE_URL": "postgresql://me:p4/ss@w0rd@db.example/x", "PROXY": "http://me:pr0xypw@proxy:3128", "PIN": 12345678,
    "SLACK": "xoxb-" + "1" * 12, "GOOGLE": "AIza" + "g" * 35, "WANDB_API_KEY": "h" * 40, "COMET": "i" * 25,
    "NPM": "npm_" + "j" * 36, "DB_PWD": "hunter2", "LICENCE": "AAAA-BBBB-CCCC-DDDD", "COOKIE": "session=abcdef0123",
    "KEY_PEM": "-----BEGIN PRIVATE KEY-----\nMIIEvQ\n-----END PRIVATE KEY-----",
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_no_variable_of_env_stands_in_clear(name: str) -> None:
    found = sealed({"env": {name: KINDS[name], "OMP_NUM_THREADS": 4, "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}})
    assert str(KINDS[name]) not in repr(found)
    back = opened(found)["env"]
    assert back == {name: str(KINDS[name]), "OMP_NUM_THREADS": 4, "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    assert sealed(found) == found


LOOKS = ("HF_TOKEN", "GH_PAT", "GH_FINE", "GH_APP", "GL_TOKEN", "OPENAI_API_KEY", "AWS_ACCESS_KEY_ID", "AUTH_HEADER",
         "JWT", "DATABASE_URL", "PROXY", "SLACK", "GOOGLE", "NPM")  # fmt: skip


@pytest.mark.parametrize("name", LOOKS)
def test_a_secret_is_told_by_its_look_anywhere_in_a_recipe(name: str) -> None:
    given = {"model_init_kwargs": {"note": f"see {KINDS[name]} there"}}
    secret = {"DATABASE_URL": "p4/ss", "PROXY": "pr0xypw", "AUTH_HEADER": "abcdefgh"}.get(name, str(KINDS[name]))
    assert secret not in repr(sealed(given))
    assert opened(sealed(given)) == given
    assert secret not in without_secrets(f"see {KINDS[name]} there")


@pytest.mark.parametrize(
    "arguments",
    [
        ["search", "--pasword", "secretpw"], ["search", "--pg-url=postgresql://me:secretpw@h/d"],
        ["studies", "--storag", "postgresql://me:secretpw@h/d"], ["studies", "postgresql://me:secretpw@h/d"],
        ["studies", "--storage", "postgres//me:secretpw@h/d"], ["studies", "--storage", "secretpw:x@h"],
        ["studies", "--storage", "postgresql://me:secretpw/@h:x/d"], ["studies", "--storage", "postgresql://me:secretpw@"],
        ["studies", "--storage", "mysql://me:secretpw@h/d"], ["jobs", "tail", "x://me:secretpw@h"],
        ["search", "--set", "env.KEY=[secretpw"], ["search", "--storage=postgres:secretpw"],
        ["report", "--dir", "gone", "postgresql://me:secretpw@h/d"], ["explain", "https://me:secretpw@h/run.yaml"],
        ["sync", "--dir", "https://me:secretpw@h/x"], ["search", "--target-vram", f"https://me:secretpw{'x' * 99}@h"],
    ],
)  # fmt: skip
def test_no_error_of_the_command_line_shows_a_password(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOFIT_STORAGE", "")  # the command line sets it
    assert main(arguments) == 2
    assert "secretpw" not in "".join(capsys.readouterr())


def test_a_port_is_no_password() -> None:
    text = "nothing answers at http://localhost:8080/a... (80 characters), nor at https:/h:80/x"
    assert without_secrets(text) == text


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
@pytest.mark.usefixtures("warm")
def test_no_file_of_a_search_and_its_full_run_holds_a_secret_but_the_tuned_yaml(tiny_recipe: Path) -> None:
    values = yaml.safe_load(tiny_recipe.read_text())
    values |= {"hub_token": TOKEN, "env": {**values.get("env", {}), "WANDB_API_KEY": KEY, "GH": PASSWORD}}
    folder = Path("studies").absolute()
    found = autofit.search(values, name="tiny", device="cpu", target_vram="3GB", trials=1, folder=folder)
    assert found.winner is not None
    done = autofit.promote("best", folder=folder)
    assert done.status == "done"
    synced = command_line.run(tiny_recipe.parent, "sync", "--dir", str(folder))
    assert synced.returncode == 0, synced.stderr
    assert yaml.safe_load(done.yaml_path.read_text())["hub_token"] == TOKEN  # as the user wrote it there
    assert stat.S_IMODE(done.yaml_path.stat().st_mode) == 0o600
    output = Path(values["output_dir"])
    files = [path for home in (folder, output) for path in home.rglob("*") if path.is_file() and path != done.yaml_path]
    assert len([path for path in files if path.is_relative_to(folder)]) > 20
    assert stat.S_IMODE((folder / "studies.db").stat().st_mode) == 0o600
    assert {path.name for path in files} >= {"studies.db", "mlflow.db", "probe.log", "training_args.bin"}
    with_secrets = [path for path in files if any(s.encode() in path.read_bytes() for s in (TOKEN, KEY, PASSWORD))]
    assert with_secrets == []
    assert TOKEN not in repr(os.environ)


def test_a_full_run_has_its_variables_before_anything_uses_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autofit.promotion import training

    seen: list[str | None] = []

    def load(name: str) -> object:
        seen.append(os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
        raise RuntimeError("enough")

    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(training, "load", load)
    monkeypatch.setattr(training, "start_mirror", lambda *_: None)
    request = tmp_path / "request.json"
    request.write_text(json.dumps({
        "folder": str(tmp_path), "output_dir": str(tmp_path / "out"), "trainer": "grpo", "device": "cpu",
        "values": {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
    }))  # fmt: skip
    try:
        assert training.main(str(request)) == 1
    finally:
        os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    assert seen == ["expandable_segments:True"]
