"""A config.json that no model has is refused in one line, before anything is built."""

import json
import os
from pathlib import Path

import pytest

from autofit.errors import ConfigError
from autofit.recipe import catalogue
from autofit.trainers.offline import read_config_file

SMALL = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "rope_theta": 1e6, "torch_dtype": "float32"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(SMALL | {"num_hidden_layers": 10**7}), "num_hidden_layers must be .* to 2,000; got 10000000"),
        (json.dumps({"text_config": SMALL | {"num_local_experts": 10**9}}), "num_local_experts must be"),
        (json.dumps(SMALL | {"hidden_size": -1}), "hidden_size must be a number from 0"),
        (json.dumps(SMALL | {"max_position_embeddings": 10**30}), "max_position_embeddings must be"),
        ('{"vocab_size": Infinity}', "vocab_size must be"),
        ('{"vocab_size": NaN}', "vocab_size must be"),
        ('{"a": ' + "1" * 5000 + "}", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ("{" + " " * 5_000_000 + "}", "at most 4 MiB"),
    ],
)
def test_sizes_that_no_model_has_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        read_config_file(path)
    assert len(str(raised.value).replace(str(tmp_path), "")) <= 300


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="regular file"):
        read_config_file(tmp_path / "config.json")


def test_a_file_that_cannot_be_read_is_not_called_bad_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: Permission denied"):
        read_config_file(tmp_path / "config.json")


def test_the_models_of_the_catalogue_are_believable(tmp_path: Path) -> None:
    names = catalogue.names()
    assert len(names) > 100
    for name in names:
        known = catalogue.architecture(name)
        assert known is not None
        path = tmp_path / "config.json"
        path.write_text(json.dumps(dict(known.config)))
        assert read_config_file(path)
