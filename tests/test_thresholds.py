"""The thresholds of guards: one clear reason for all that is wrong in a file, and what the shipped file proposes."""

import json
from importlib import resources
from pathlib import Path

import pytest
import yaml

from autofit.cli import main
from autofit.errors import ConfigError
from autofit.watching.thresholds import guards_of, read_guards


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"kll": {"max": 0.1}}, "kll: a guard of one's own needs a metric; autofit has none of this name; the nearest "
                                "valid one is 'kl'"),
        ({"kl": {"mxa": 0.1}}, "kl: unknown key 'mxa'; the nearest valid one is 'max'"),
        ({"kl": {"max": "high"}}, "kl: max must be a number; got 'high'"),
        ({"kl": {"max": True}}, "kl: max must be a number; got True"),
        ({"kl": 0.1}, "kl: must be `off`, or a mapping"),
        ({"kl": {"window": 0, "patience": 1.5}}, "kl: window must be 1 or more; got 0; kl: patience must be a whole"),
        ({"kl": {"window": 10**9}}, "at most 1000"),
        ({"kl": {"action": "pause"}}, "kl: action must be alert or stop; got 'pause'"),
        ({"kl": {"min": 0.2}}, "kl: min must be below max; got 0.2 and 0.15"),
        ({"kl": {"says": "{nothing}"}}, "says may name {metric}"),
        ({"kl": {"says": "{value:9999999999}"}}, "with formats as in {value:.3g}; got '{value:9999999999}'"),
        ({"kl": {"says": "{value:{seconds}}"}}, "with formats as in {value:.3g}"),
        ({"kl": {"says": "{metric.__class__}"}}, "says may name {metric}, {part}, {value}, {seconds}, {of_seconds}"),
        ({"kl": {"says": "{metric:.3f}"}}, "says may name {metric}"),
        ({"kl": {"says": "{value"}}, "says may name {metric}"),
        ({"truncaton": False}, "truncaton: there is no such guard to turn off; the nearest valid one is 'truncation'"),
        ({"mine": {"metric": "x"}}, "mine: check band needs min or max"),
        ({"mine": {"metric": 3, "max": 1}}, "mine: metric must be a name or a list of names; got 3"),
        ({"a b": {"metric": "x", "max": 1}}, "names a tag"),
        ({"length_collapse": {"share": 0}}, "share must be above 0"),
    ],
)  # fmt: skip
def test_wrong_thresholds_are_refused_with_all_that_is_wrong(
    content: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as of_mapping:
        read_guards(content)
    assert said in str(of_mapping.value)
    path = tmp_path / "guards.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="the guards file "):
        read_guards(path)


def test_a_file_that_is_missing_or_no_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_guards(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("kl: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_guards(tmp_path / "bad.yaml")


def test_the_command_refuses_wrong_guards_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guards.yaml").write_text("trunkation: {max: 0.1}\n")
    assert main(["promote", "best", "--guards", "guards.yaml"]) == 2
    said = capsys.readouterr().err
    assert "the guards file guards.yaml: trunkation: a guard of one's own needs a metric" in said
    assert "the nearest valid one is 'truncation'" in said


def test_guards_survive_the_request_and_off_leaves_none() -> None:
    guards = read_guards({"mine": {"metric": ["a", "b/*"], "max": 1}})
    kept = json.loads(json.dumps([guard.to_json() for guard in guards]))
    assert guards_of(kept) == guards
    assert guards_of(None) == read_guards()
    assert read_guards("off") == ()


def test_the_bands_that_the_file_proposes_can_be_used_as_they_are() -> None:
    text = (resources.files("autofit.watching") / "guards.yaml").read_text()
    proposed = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith(("#   kl", "#   judge"))]
    found = {guard.name: guard for guard in read_guards(yaml.safe_load("\n".join(proposed)))}
    assert "kl" not in found
    assert (found["kl_facts"].min, found["kl_facts"].max, found["kl_helps"].max) == (0.02, 0.06, 0.15)
    assert found["judge"].max == 6
