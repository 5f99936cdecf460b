"""Wrong input gets one clear error: what must hold, what was given, what to change; exit code 2; no traceback."""

import json
import re
from pathlib import Path

import command_line
import pytest
import tiny
import yaml

from autofit.cli import main
from autofit.errors import ConfigError
from autofit.plugin.registry import trainer_for
from autofit.probing.fork_server import ForkServer
from autofit.probing.prepare import prepare
from autofit.recipe.profile import TAKEN_BY, TRAINERS
from autofit.recipe.recipe import TrainerName


def change(path: Path, **changes: object) -> Path:
    values = yaml.safe_load(path.read_text()) | changes
    path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 8}, "unknown key 'lora_rank'; the nearest valid one is 'lora_r'"),
        ({"per_device_train_batch_size": "four"}, "per_device_train_batch_size must be a whole number; got the text"),
        ({"per_device_train_batch_size": [4]}, r"per_device_train_batch_size must be a whole number; got \[4\]"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be 1 or more; got 0"),
        ({"learning_rate": "fast"}, "learning_rate must be"),
        ({"bf16": "maybe"}, "bf16 must be"),
        ({"num_generations": 3}, r"generation_batch_size \(8\) must be divisible by num_generations \(3\)"),
        ({"num_generations": 1, "per_device_train_batch_size": 4}, "num_generations must be 2 or more"),
        ({"loss_type": "dappo"}, "loss_type must be one of .* the nearest valid one is 'dapo'"),
        ({"dtype": "float64"}, "dtype must be one of"),
        ({"model_name_or_path": "no/such-model"}, "model_name_or_path must be a folder .* got 'no/such-model'"),
        ({"model_name_or_path": None}, "needs a model"),
        ({"dataset_name": "no/such-dataset"}, "the dataset no/such-dataset cannot be"),
        ({"dataset_name": "gone.jsonl"}, "there is no such file"),
        ({"dataset_name": None}, "needs a dataset"),
        ({"dataset_train_split": "trian"}, "dataset_train_split 'trian' is not in the dataset; it has train"),
        ({"reward_funcs": ["no_such_module.reward"]}, "must be importable .* No module named 'no_such_module'"),
        ({"reward_funcs": ["tiny_rewards.share_of_t2"]}, "no function 'share_of_t2'; the nearest .*'share_of_t1'"),
        ({"reward_funcs": ["acuracy_reward"]}, "the nearest valid one is 'accuracy_reward'"),
        ({"reward_funcs": None}, "needs a reward"),
        ({"reward_funcs": "accuracy_reward"}, r"write reward_funcs: \[accuracy_reward\]"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size must be false"),
        ({"env": ["A=1"]}, "env"),
        ({"fp16": True, "bf16": True}, "bf16 and fp16"),
        ({"lora_r": -1}, "lora_r must be 1 or more"),
    ],
)
def test_a_recipe_that_trl_would_not_take_is_one_line_with_the_key(
    tiny_recipe: Path, fork_server: ForkServer, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        prepare(change(tiny_recipe, **changes), trainer="grpo", device="cpu", folder=tiny_recipe.parent / "i",
                server=fork_server)  # fmt: skip
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [('{"question": "t1"}\n', "needs a dataset with a column 'prompt'"), ("", "cannot be|empty"),
     ("not json\n", "cannot be read|cannot be loaded"), ('{"prompt": 5}\n', "a prompt must be text"),
     ('{"prompt": [{"role": "user", "content": "t1"}]}\n', "has no chat template")],
)  # fmt: skip
def test_a_dataset_that_grpo_cannot_use_says_why(
    tiny_recipe: Path, fork_server: ForkServer, rows: str, message: str
) -> None:
    (tiny_recipe.parent / "data" / "train.jsonl").write_text(rows)
    with pytest.raises(ConfigError, match=message):
        prepare(tiny_recipe, trainer="grpo", device="cpu", folder=tiny_recipe.parent / "i", server=fork_server)


def test_a_reward_of_trl_that_reads_messages_is_refused_where_the_prompts_are_text(
    tiny_recipe: Path, fork_server: ForkServer
) -> None:
    path = change(tiny_recipe, reward_funcs=["think_format_reward"])
    with pytest.raises(ConfigError, match=r"think_format_reward of TRL reads messages, and the prompts .* are text"):
        prepare(path, trainer="grpo", device="cpu", folder=tiny_recipe.parent / "i", server=fork_server)


def test_a_jsonl_file_is_a_dataset_too_and_is_said_the_way_trl_takes_it(
    tiny_recipe: Path, fork_server: ForkServer
) -> None:
    tiny.write_dataset(tiny_recipe.parent / "rows.jsonl", rows=9)
    recipe = prepare(change(tiny_recipe, dataset_name="rows.jsonl"), trainer="grpo", device="cpu",
                     folder=tiny_recipe.parent / "i", server=fork_server)  # fmt: skip
    assert recipe.values["datasets"] == [{"path": "json", "data_files": "rows.jsonl"}]
    assert recipe.num_prompts == 9


@pytest.mark.parametrize(
    ("trainer", "changes", "row", "message"),
    [
        ("sft", {"max_lenght": 1}, None, "unknown key 'max_lenght'; the nearest valid one is 'max_length'"),
        ("sft", {}, {"question": "t1"}, "SFT needs a dataset with the columns text .* has question; rename"),
        ("sft", {"max_length": 2}, {"prompt": "t1 t2 t3", "completion": " t4"}, "none of the 1 samples is left"),
        ("sft", {"dataset_streaming": True}, None, "set dataset_streaming to false"),
        ("sft", {}, {"messages": [{"role": "user", "content": "t1"}]}, "no chat template; .* chat_template_path"),
        ("sft", {"assistant_only_loss": True}, {"messages": [{"role": "user", "content": "t1"}]}, "no chat template"),
        ("dpo", {}, {"prompt": "t1", "chosen": "t2"}, "DPO needs a dataset with the columns chosen and rejected"),
        ("dpo", {"use_peft": True, "sync_ref_model": True, "beta": -1}, {"chosen": 1, "rejected": 2}, "cannot use"),
        ("reward", {}, {"text": "t1"}, "Reward needs a dataset with the columns chosen and rejected"),
        ("reward", {"max_length": 1}, None, "none of the 24 samples is left to train on at max_length=1"),
    ],
)  # fmt: skip
def test_what_another_trainer_cannot_use_is_one_line(
    tiny_recipe: Path, tiny_model: Path, fork_server: ForkServer, trainer: TrainerName, changes: dict[str, object],
    row: dict[str, object] | None, message: str,
) -> None:  # fmt: skip
    path = tiny.write_offline_recipe(trainer, tiny_recipe.parent, tiny_model, **changes)
    if row is not None:
        (tiny_recipe.parent / "data" / "train.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=message) as raised:
        prepare(path, trainer=trainer, device="cpu", folder=tiny_recipe.parent / "i", server=fork_server)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("keys", "asked", "answer"),
    [
        ({"packing", "max_length"}, None, "sft"),
        ({"precompute_ref_log_probs"}, None, "dpo"),
        ({"beta", "max_length"}, None, "dpo"),
        ({"center_rewards_coefficient"}, None, "reward"),
        ({"beta", "learning_rate"}, None, "grpo"),
        ({"learning_rate", "unheard_of"}, None, "grpo"),
        ({"reward_funcs", "max_length"}, None, "grpo"),
        ({"max_length"}, "reward", "reward"),
        ({"max_length"}, None, "max_length may belong to a recipe of sft or dpo or reward: choose one with --trainer"),
        ({"packing"}, "dpo", "--trainer dpo does not take packing; .* give --trainer sft"),
        ({"reward_funcs"}, "sft", "--trainer sft does not take reward_funcs; .* give --trainer grpo"),
        ({"packing"}, "stf", "--trainer must be one of .*; got 'stf'; the nearest valid one is 'sft'"),
    ],
)
def test_the_trainer_is_told_by_keys_that_leave_no_doubt(keys: set[str], asked: str | None, answer: str) -> None:
    values = dict.fromkeys(sorted(keys), 1)
    if answer in TRAINERS:
        assert trainer_for(values, asked) == answer
    else:
        with pytest.raises(ConfigError, match=answer):
            trainer_for(values, asked)


def test_the_telling_keys_are_trls() -> None:
    import importlib
    from dataclasses import fields

    taken = {t: {f.name for kind in importlib.import_module(f"trl.scripts.{t}").make_parser().dataclass_types
                 for f in fields(kind) if f.init} for t in TRAINERS}  # fmt: skip
    true = {key: tuple(t for t in TRAINERS if key in taken[t]) for key in set.union(*taken.values())}
    telling = {key: takers for key, takers in true.items() if len(takers) < 4}
    assert {key: telling[key] for key in TAKEN_BY} == TAKEN_BY
    assert {key for key, takers in telling.items() if takers != ("grpo",)} <= set(TAKEN_BY)


SEARCH = ["search", "run.yaml", "--target-vram", "1GB", "--device", "cpu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", "run.yaml", "--device", "cpu", "--target-vram", "900TB"], "at most the machine's memory of"),
        (["search", "run.yaml", "--target-vram", "0GB"], "autofit: --target-vram: an amount of memory must be above"),
        (["search", "run.yaml", "--demo", "--target-vram", "3GB"], "not both"),
        (["search", "gone.yaml", "--target-vram", "3GB"], "gone.yaml does not exist"),
        (["search", ".", "--target-vram", "3GB"], "is a folder"),
        (["search", "list.yaml", "--target-vram", "3GB"], "must be a YAML mapping .* is a list"),
        (["search", "broken.yaml", "--target-vram", "3GB"], "not valid YAML: .*line 1"),
        (["search", "twice.yaml", "--target-vram", "3GB"], "given twice: a"),
        (["search", "empty.yaml", "--target-vram", "3GB"], "is empty"),
        (["search", "binary.yaml", "--target-vram", "3GB"], "UTF-8"),
        (["search", "run.yaml", "--target-vram", "3"], "must look like 40GB"),
        (["search", "run.yaml", "--target-vram", "9000GB", "--device", "cpu"], "must be at most the machine's memory"),
        (["search", "run.yaml", "--target-vram", "3GB", "--headroom", "4GB"], "--headroom must be below"),
        ([*SEARCH, "--trials", "0"], "--trials must be 1 or more; got 0"),
        ([*SEARCH, "--trials", "many"], "invalid int value"),
        ([*SEARCH, "--trails", "3"], "nearest valid one is '--trials'|unrecognized arguments"),
        ([*SEARCH, "--nodes", "2"], "--gpu 2x8xh100 says two machines"),
        ([*SEARCH, "--allow", "everything"], "invalid choice"),
        ([*SEARCH, "--space", "gone.yaml"], "search space gone.yaml does not exist"),
        ([*SEARCH, "--space", "grpoo"], "no search space 'grpoo'; the nearest valid one is 'grpo'"),
        ([*SEARCH, "--trainer", "ppo"], "--trainer must be one of"),
        ([*SEARCH, "--time-budget", "soon"], "a duration must look like"),
        ([*SEARCH, "--world-size", "0"], "--num_processes must be 1 or more; got 0"),
        ([*SEARCH[:2], "--gpu", "8xt4", "--gpus", "4"], "--gpu 8xt4 says 8 cards, and --gpus 4"),
        ([*SEARCH[:2], "--gpu", "0xt4"], "--gpu 0xt4 must name 1 card or more"),
        ([*SEARCH[:2], "--gpu", "8xt5"], "unknown GPU 't5'"),
        ([*SEARCH, "--dir", "run.yaml"], "must be a folder|cannot write"),
        (["search", "run.yaml", "--target-vram", "1GB", "--device", "cuda"], "needs a CUDA card"),
        (["doctor", "run.yaml", "--gpu", "t5"], "unknown GPU .t5."),
        (["promote", "best"], "there are no studies in .*autofit-studies"),
        (["promote"], "required: TRIAL"),
        (["ui"], "there are no studies"),
        (["sync", "--study", "x", "--dir", "gone"], "there are no studies in .*gone"),
        (["report"], "there are no studies"),
        (["serach"], "there is no command 'serach'; the nearest valid one is 'search'"),
        ([], "required: COMMAND"),
        (["ui", "--port", "99999999"], "--port must be between"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    recipe = "{model_name_or_path: Qwen/Qwen3-0.6B, dataset_name: c/d}"
    for name, text in {"run.yaml": recipe, "list.yaml": "- 1", "broken.yaml": "a: [", "twice.yaml": "a: 1\na: 2",
                       "empty.yaml": ""}.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert exit_code_of(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert re.search(message, err), err
    assert not re.search("---|\x02|\x03", err), err


@pytest.mark.parametrize(
    "arguments",
    [
        ["estimate", "--gpu", "x" * 5000],
        ["search", "a\nb\x1b[31m.yaml"],
        ["search", "--target-vram", "4" * 400 + "GB"],
        ["search", "a" * 4000],
        ["report", "no such \udcff study"],
        ["search", "--target-vram", "40GB", "--set", "lora_r" * 500 + "=1"],
    ],
)
def test_an_error_is_one_printable_line_of_at_most_600_characters(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code_of([*arguments, "--dir", "studies"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    *before, last = err.splitlines()
    assert not [line for line in before if line.startswith("autofit: ")]
    assert last.startswith("autofit: ")
    assert last.isprintable()
    assert len(last.removeprefix("autofit: ")) <= 600


def exit_code_of(arguments: list[str]) -> int:
    """What `autofit` ends with: most is decided by its commands, and some by argparse."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return int(str(ended.code))


def test_a_target_below_the_weights_is_refused_before_any_probe(tiny_recipe: Path) -> None:
    done = command_line.run(tiny_recipe.parent, "search", str(tiny_recipe), "--target-vram", "50KB", "--device", "cpu")
    assert done.returncode == 2
    assert "at least the model's weights" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_row_reaches_the_reward_with_the_types_the_dataset_gave_it(
    tiny_recipe: Path, fork_server: ForkServer
) -> None:
    import datetime

    import datasets

    rows = {
        "prompt": ["t1 t2"] * 9,
        "when": [datetime.datetime(2026, 11, 21)] * 9,
        "blob": [b"x"] * 9,
        "opt": [None] * 9,
    }
    (tiny_recipe.parent / "data" / "train.jsonl").unlink()
    datasets.Dataset.from_dict(rows).to_parquet(tiny_recipe.parent / "data" / "train.parquet")
    prepare(tiny_recipe, trainer="grpo", device="cpu", folder=tiny_recipe.parent / "i", server=fork_server)
    row = datasets.load_from_disk(str(tiny_recipe.parent / "i" / "worst_row"))[0]
    assert (row["when"].year, row["blob"], row["opt"]) == (2026, b"x", None)


def test_a_recipe_is_known_again_until_its_rewards_or_data_change(tiny_recipe: Path, fork_server: ForkServer) -> None:
    def content_hash() -> str:
        return prepare(tiny_recipe, trainer="grpo", device="cpu", folder=tiny_recipe.parent / "i",
                       server=fork_server).content_hash  # fmt: skip

    first = content_hash()
    assert content_hash() == first
    with (tiny_recipe.parent / "tiny_rewards.py").open("a") as file:
        file.write("# mended\n")
    second = content_hash()
    tiny.write_dataset(tiny_recipe.parent / "data" / "train.jsonl", rows=30)
    assert len({first, second, content_hash()}) == 3
