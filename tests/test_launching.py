"""How a recipe is launched: every way in which users say it, and the accelerate config that says it again."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from autofit.errors import ConfigError
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch
from autofit.recipe.launch_keys import FLAGS, NOT_BESIDE_JSON, SECTION_KEYS, TYPES
from autofit.recipe.launching import Launched, LaunchOptions, launched
from autofit.recipe.profile import profile

NOWHERE: Mapping[str, str] = {}


def read(values: Mapping[str, object], environment: Mapping[str, str] = NOWHERE, **options: object) -> Launched:
    return launched(values, LaunchOptions(**options), environment=environment)  # type: ignore[arg-type]


def test_a_recipe_without_a_word_on_it_is_one_plain_rank() -> None:
    found = read({"learning_rate": 1e-5})
    assert found.launch == Launch()
    assert found.values == {"learning_rate": 1e-5}
    assert not found.notes


@pytest.mark.parametrize(
    ("name", "sharding"),
    [("multi_gpu", "ddp"), ("fsdp1", "fsdp1"), ("fsdp2", "fsdp2"), ("zero1", "zero1"), ("zero2", "zero2"),
     ("zero3", "zero3")],
)  # fmt: skip
def test_a_name_that_trl_ships_is_read_from_the_yaml_as_from_the_command_line(name: str, sharding: str) -> None:
    stated = read({"accelerate_config": name, "beta": 0.1})
    assert stated.launch.sharding == sharding
    assert stated.launch.ranks == 8
    assert stated.values == {"beta": 0.1}
    assert read({"beta": 0.1}, accelerate_config=name).launch == stated.launch
    assert read({"accelerate_config": name, "num_processes": 4}).launch.ranks == 4
    assert read({"accelerate_config": name, "num_processes": 4}, num_processes=2).launch.ranks == 2


def test_what_replaces_what_is_said() -> None:
    found = read({"accelerate_config": "zero2", "num_processes": 4}, accelerate_config="fsdp2", num_processes=2)
    assert (found.launch.sharding, found.launch.ranks) == ("fsdp2", 2)
    assert len(found.notes) == 2


def test_ranks_alone_are_ddp_and_torchruns_environment_counts_where_nothing_else_does() -> None:
    alone = read({"num_processes": 4}).launch
    assert (alone.ranks, alone.sharding, alone.offload) == (4, "ddp", "none")
    assert read({}, {"WORLD_SIZE": "4"}).launch.ranks == 4
    assert read({}, {"WORLD_SIZE": "4"}).launch.sharding == "ddp"
    assert read({"accelerate_config": "fsdp2"}, {"WORLD_SIZE": "4"}).launch.ranks == 8
    assert read({"fsdp": True}, {"WORLD_SIZE": "4"}).launch.sharding == "fsdp2"
    assert read({"num_processes": 2}, {"WORLD_SIZE": "4"}).launch.ranks == 2
    assert read({}, {"WORLD_SIZE": "1"}).launch.is_plain


def fsdp(folder: Path, **keys: object) -> Launch:
    """The launch of an accelerate config with these keys of `fsdp_config`, as `accelerate launch` reads it."""
    path = folder / "accelerate.yaml"
    config = {"distributed_type": "FSDP", "num_processes": 4, "gpu_ids": "0,1,2,3", "fsdp_config": keys}
    path.write_text(yaml.safe_dump(config))
    return read({}, accelerate_config=str(path)).launch


def test_what_an_fsdp_config_leaves_out_is_left_to_accelerate(tmp_path: Path) -> None:
    """accelerate 1.15: without a policy the model is one group, and FSDP2 saves in shards."""
    launch = fsdp(tmp_path, fsdp_version=2)
    written = launch.to_accelerate()["fsdp_config"]
    assert written == {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False}
    ours = Launch(ranks=4, sharding="fsdp2").to_accelerate()["fsdp_config"]
    assert isinstance(ours, dict)
    assert (ours["fsdp_auto_wrap_policy"], ours["fsdp_state_dict_type"]) == (
        "TRANSFORMER_BASED_WRAP",
        "FULL_STATE_DICT",
    )


def test_keys_of_fsdp_may_lack_their_prefix(tmp_path: Path) -> None:
    launch = fsdp(tmp_path, version=2, reshard_after_forward=False, offload_params=True)
    assert (launch.sharding, launch.reshard_after_forward, launch.offload) == ("fsdp2", False, "parameters")
    written = replace(launch, offload="none", reshard_after_forward=True).to_accelerate()["fsdp_config"]
    assert written == {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False}


def test_each_version_of_fsdp_has_its_own_key_for_resharding(tmp_path: Path) -> None:
    """`accelerate launch` always sets FSDP_SHARDING_STRATEGY, which FSDP1 prefers and FSDP2 does not know."""
    assert fsdp(tmp_path, fsdp_version=2, fsdp_sharding_strategy="SHARD_GRAD_OP").reshard_after_forward
    assert fsdp(tmp_path, fsdp_version=1, fsdp_reshard_after_forward="SHARD_GRAD_OP").reshard_after_forward
    kept = fsdp(tmp_path, fsdp_version=1, fsdp_sharding_strategy="SHARD_GRAD_OP")
    assert not kept.reshard_after_forward
    for launch, strategy in ((kept, "SHARD_GRAD_OP"), (replace(kept, reshard_after_forward=True), "FULL_SHARD")):
        written = launch.to_accelerate()["fsdp_config"]
        assert isinstance(written, dict)
        assert written["fsdp_sharding_strategy"] == strategy
        assert "fsdp_reshard_after_forward" not in written


@pytest.mark.parametrize(
    ("word", "reshards", "other"),
    [("HYBRID_SHARD", True, "SHARD_GRAD_OP"), ("HYBRID_SHARD_ZERO2", False, "FULL_SHARD"),
     ("hybrid_shard", True, "SHARD_GRAD_OP"), (4, True, "SHARD_GRAD_OP")],
)  # fmt: skip
def test_hybrid_sharding_on_one_machine_is_the_plain_one_and_keeps_its_word(
    word: object, reshards: bool, other: str, tmp_path: Path
) -> None:
    from autofit.plugin.ranks import rank_environment

    def written(launch: Launch) -> object:
        config = launch.to_accelerate()["fsdp_config"]
        assert isinstance(config, dict)
        return config["fsdp_sharding_strategy"]

    launch = fsdp(tmp_path, fsdp_version=1, fsdp_sharding_strategy=word)
    assert launch.reshard_after_forward is reshards
    assert written(launch) == ("HYBRID_SHARD" if word == 4 else str(word).upper())
    assert written(replace(launch, reshard_after_forward=not reshards)) == other
    plain = "FULL_SHARD" if reshards else "SHARD_GRAD_OP"
    assert written(replace(launch, machines=2)) == plain
    probed = rank_environment(launch, rank=0, port=1, device="sim:a100-80gb")
    assert probed["FSDP_SHARDING_STRATEGY"] == plain


def test_hybrid_sharding_of_several_machines_and_no_sharding_say_what_to_take(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    hybrid = {"fsdp_version": 1, "fsdp_sharding_strategy": "HYBRID_SHARD"}
    path.write_text(
        yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 4, "num_machines": 2, "fsdp_config": hybrid})
    )
    with pytest.raises(ConfigError, match="HYBRID_SHARD on several machines is not supported; take FULL_SHARD"):
        read({}, accelerate_config=str(path))
    with pytest.raises(ConfigError, match=r"NO_SHARD shards nothing.*--accelerate_config multi_gpu"):
        fsdp(tmp_path, fsdp_version=1, fsdp_sharding_strategy="NO_SHARD")


def test_the_cards_of_a_config_go_with_their_number(tmp_path: Path) -> None:
    launch = fsdp(tmp_path, fsdp_version=2)
    assert launch.to_accelerate()["gpu_ids"] == "0,1,2,3"
    assert "gpu_ids" not in replace(launch, ranks=8).to_accelerate()


@pytest.mark.parametrize("kind", ["MULTI_GPU", "FSDP", "DEEPSPEED"])
def test_ranks_that_nobody_says_are_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": kind}))
    found = read({}, accelerate_config=str(path))
    assert found.launch.ranks == 1
    assert [note for note in found.notes if "has no num_processes" in note and "1 rank is taken" in note]
    for said in (
        read({"num_processes": 2}, accelerate_config=str(path)), read({}, {"WORLD_SIZE": "2"},
        accelerate_config=str(path)), read({}, accelerate_config=str(path), num_processes=2),
        read({}, accelerate_config=str(path), gpus=2), read({LAUNCH: {"ranks": 2}}, accelerate_config=str(path)),
    ):  # fmt: skip
        assert not said.notes


@pytest.mark.parametrize(
    ("keys", "precision"),
    [({"fp16": True}, "fp16"), ({"fp16": False}, "no"), ({"fp16": True, "mixed_precision": "bf16"}, "bf16")],
)
def test_the_older_key_fp16_is_written_as_accelerate_reads_it(
    keys: dict[str, object], precision: str, tmp_path: Path
) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "MULTI_GPU", "num_processes": 2, **keys}))
    written = read({}, accelerate_config=str(path)).launch.to_accelerate()
    assert written["mixed_precision"] == precision
    assert "fp16" not in written


def test_what_is_offloaded_to_nvme_stays_there(tmp_path: Path) -> None:
    zero = {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/nvme"}
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": zero}))
    launch = read({}, accelerate_config=str(path)).launch
    written = launch.to_accelerate()["deepspeed_config"]
    assert isinstance(written, dict)
    assert (written["offload_param_device"], written["offload_optimizer_device"]) == ("nvme", "cpu")
    none = replace(launch, offload="none").to_accelerate()["deepspeed_config"]
    assert isinstance(none, dict)
    assert none["offload_param_device"] == "none"


def test_flags_of_accelerate_lie_over_its_config() -> None:
    found = read({"accelerate_config": "fsdp2", "fsdp_reshard_after_forward": False, "fsdp_offload_params": True})
    assert not found.launch.reshard_after_forward
    assert found.launch.offload == "parameters"
    zero = read({"accelerate_config": "zero2", "zero_stage": 3, "offload_optimizer_device": "cpu"}).launch
    assert (zero.sharding, zero.offload) == ("zero3", "optimizer")
    turned_on = read({"use_fsdp": True, "fsdp_version": 2, "num_processes": 2})
    assert turned_on.launch.sharding == "fsdp2"
    assert "trl" in turned_on.notes[0]


@pytest.mark.parametrize("fsdp", [True, "full_shard auto_wrap", ["full_shard", "auto_wrap"], "true"])
def test_transformers_fsdp_is_read_with_its_config(fsdp: object) -> None:
    found = read({"fsdp": fsdp, "fsdp_config": {"cpu_ram_efficient_loading": True}, "num_processes": 4})
    assert found.launch.sharding == "fsdp2"
    assert found.launch.reshard_after_forward
    assert found.values == {}
    written = found.launch.to_accelerate()["fsdp_config"]
    assert isinstance(written, dict)
    assert written["fsdp_cpu_ram_efficient_loading"] is True


def test_the_older_words_of_fsdp_mean_reshard_and_offload(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps({"fsdp_version": 1, "transformer_layer_cls_to_wrap": ["A", "B"]}))
    one = read({"fsdp": "shard_grad_op auto_wrap offload", "fsdp_config": str(path), "num_processes": 2}).launch
    assert (one.sharding, one.reshard_after_forward, one.offload) == ("fsdp1", True, "parameters")
    two = read({"fsdp": "shard_grad_op", "num_processes": 2}).launch
    assert (two.sharding, two.reshard_after_forward) == ("fsdp2", False)
    assert read({"fsdp_config": {"version": 1}}).launch.is_plain
    assert "has no effect" in read({"fsdp_config": {"version": 1}}).notes[0]


def test_a_strategy_that_accelerate_does_not_hand_on_to_fsdp1_is_said() -> None:
    """FSDP_SHARDING_STRATEGY, or FULL_SHARD without it, is preferred to the argument of transformers."""
    one = {"version": 1}
    found = read({"fsdp": "shard_grad_op", "fsdp_config": one, "num_processes": 2})
    assert found.launch.reshard_after_forward
    assert "shard_grad_op has no effect" in found.notes[0]
    assert not read({"fsdp": "full_shard", "fsdp_config": one, "num_processes": 2}).notes
    with pytest.raises(ConfigError, match=r"reshard_after_forward must be one of full_shard, .*; got True"):
        read({"fsdp": True, "fsdp_config": {**one, "reshard_after_forward": True}})


def test_what_fsdp_config_of_transformers_leaves_out_is_transformers_own() -> None:
    """TrainingArguments passes FULL_STATE_DICT and resharding to accelerate, whose own would be shards."""
    launch = read({"fsdp": True, "accelerate_config": "fsdp2", "fsdp_reshard_after_forward": False}).launch
    assert launch.reshard_after_forward
    written = read({"fsdp": True, "num_processes": 2}).launch.to_accelerate()["fsdp_config"]
    assert isinstance(written, dict)
    assert written["fsdp_state_dict_type"] == "FULL_STATE_DICT"


def test_accelerates_plugin_prefers_the_strategy_to_what_transformers_passes() -> None:
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1, reshard_after_forward="shard_grad_op", sync_module_states=False
    )
    assert plugin.sharding_strategy.name == "FULL_SHARD"


def test_fsdp_of_one_rank_is_plain_unless_an_accelerate_config_starts_it() -> None:
    alone = read({"fsdp": True})
    assert alone.launch.is_plain
    assert "one rank" in alone.notes[0]
    assert read({"fsdp": True}, gpus=8).launch.sharding == "fsdp2"
    assert read({}, accelerate_config="fsdp2", num_processes=1).launch.sharding == "fsdp2"


def zero_json() -> dict[str, object]:
    return {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True},
                              "reduce_bucket_size": 12345},
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"},
    }  # fmt: skip


def test_a_deepspeed_file_is_kept_with_what_a_search_changes_in_it(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(zero_json()))
    by_key = read({"deepspeed": str(path), "num_processes": 4}).launch
    by_mapping = read({"deepspeed": zero_json(), "num_processes": 4}).launch
    assert by_key == by_mapping
    assert (by_key.sharding, by_key.offload, by_key.ranks) == ("zero2", "optimizer", 4)
    config = tmp_path / "accelerate.yaml"
    config.write_text(yaml.safe_dump({
        "distributed_type": "DEEPSPEED", "num_processes": 4,
        "deepspeed_config": {"deepspeed_config_file": str(path), "zero3_init_flag": False},
    }))  # fmt: skip
    by_config = read({}, accelerate_config=str(config)).launch
    assert (by_config.sharding, by_config.offload, by_config.ranks) == ("zero2", "optimizer", 4)
    stage3 = Launch.of({LAUNCH: {**by_key.to_values(), "sharding": "zero3", "offload": "parameters"}})
    content = stage3.to_deepspeed()
    assert content is not None
    assert content["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 12345,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
    }
    written = stage3.to_accelerate()
    assert "mixed_precision" not in written
    inner = written["deepspeed_config"]
    assert isinstance(inner, dict)
    assert json.loads(inner["deepspeed_config_file"]) == content


def test_keys_that_accelerate_takes_beside_a_deepspeed_file_stay_and_others_are_refused(tmp_path: Path) -> None:
    path, config = tmp_path / "ds.json", tmp_path / "accelerate.yaml"
    path.write_text(json.dumps(zero_json()))
    beside = {"deepspeed_hostfile": "hosts", "deepspeed_multinode_launcher": "pdsh", "zero3_init_flag": False,
              "deepspeed_inclusion_filter": "a", "deepspeed_moe_layer_cls_names": "Block"}  # fmt: skip
    given = {"distributed_type": "DEEPSPEED", "num_processes": 4,
             "deepspeed_config": {"deepspeed_config_file": str(path), **beside}}  # fmt: skip
    config.write_text(yaml.safe_dump(given))
    written = read({}, accelerate_config=str(config)).launch.to_accelerate()
    inner = written["deepspeed_config"]
    assert isinstance(inner, dict)
    assert inner == {**beside, "deepspeed_config_file": inner["deepspeed_config_file"]}
    config.write_text(yaml.safe_dump(written))
    assert read({}, accelerate_config=str(config)).launch.to_accelerate() == written

    config.write_text(yaml.safe_dump({**given, "mixed_precision": "bf16"}))
    with pytest.raises(ConfigError, match="accelerate refuses mixed_precision beside a DeepSpeed JSON"):
        read({}, accelerate_config=str(config))
    with pytest.raises(
        ConfigError, match=r"zero1: accelerate refuses deepspeed_config\.gradient_acc.*zero_stage, mixed"
    ):
        read({"deepspeed": str(path)}, accelerate_config="zero1")
    assert read({"deepspeed": str(path)}, accelerate_config="multi_gpu").launch.sharding == "zero2"


def test_deepspeeds_plugin_refuses_these_keys_beside_a_file_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import DeepSpeedPlugin

    for key in (*SECTION_KEYS["deepspeed_config"], "mixed_precision"):
        monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", key)
        refused = key in NOT_BESIDE_JSON or key == "mixed_precision"
        with pytest.raises(ValueError, match="will be ignored") if refused else nullcontext():
            DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}})


def test_the_key_launch_lies_over_all_others() -> None:
    found = read({"accelerate_config": "fsdp2", "launch": {"sharding": "ddp", "ranks": 2}})
    assert (found.launch.sharding, found.launch.ranks) == ("ddp", 2)
    again = read({LAUNCH: found.launch.to_values()}, {"WORLD_SIZE": "7"})
    assert again.launch == found.launch


def test_every_launch_reads_back_from_the_accelerate_config_that_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    for sharding, offload, reshard in [
        ("ddp", "none", True), ("fsdp1", "none", False), ("fsdp1", "parameters", True), ("fsdp2", "none", True),
        ("fsdp2", "parameters", False), ("zero1", "optimizer", True), ("zero2", "optimizer", True),
        ("zero3", "parameters", True), ("zero3", "optimizer", True), ("zero3", "none", True),
    ]:  # fmt: skip
        given = Launch.of({LAUNCH: {"ranks": 4, "sharding": sharding, "offload": offload,
                                    "reshard_after_forward": reshard}})  # fmt: skip
        path.write_text(yaml.safe_dump(given.to_accelerate()))
        back = read({}, accelerate_config=str(path)).launch
        assert {**back.to_values(), "config": {}} == given.to_values()
        again = Launch.of({LAUNCH: back.to_values()})
        assert again.to_accelerate() == given.to_accelerate()


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({"accelerate_config": "fsdp3"}, {}, "one that TRL ships .*the nearest valid one is 'fsdp"),
        ({"accelerate_config": "x" * 5000}, {}, "one that TRL ships"),
        ({"accelerate_config": 2}, {}, "must be a file, or a name such as fsdp2; got 2"),
        ({"accelerate_config": "fsdp2", "config_file": "zero3"}, {}, "keep one"),
        ({"use_fsdp": True, "use_deepspeed": True}, {}, "only one of"),
        ({"use_fsdp": "yes"}, {}, "use_fsdp must be true or false"),
        ({"fsdp_version": 2}, {}, "fsdp_version has no effect without FSDP; give accelerate_config: fsdp2"),
        ({"zero_stage": 3}, {}, "zero_stage has no effect without DEEPSPEED"),
        ({"accelerate_config": "fsdp2", "zero_stage": 3}, {}, "zero_stage has no effect"),
        ({"use_megatron_lm": True}, {}, "not supported"),
        ({"fsdp": True, "deepspeed": {"zero_optimization": {"stage": 3}}}, {}, "exclude each other"),
        ({"fsdp": True, "accelerate_config": "zero3"}, {}, "exclude each other"),
        ({"fsdp": "ful_shard"}, {}, "fsdp must be true or list"),
        ({"fsdp": "hybrid_shard"}, {}, "option of FSDP1"),
        ({"fsdp": True, "fsdp_config": {"reshard": True}}, {}, "unknown key 'reshard' in fsdp_config; the nearest"),
        ({"fsdp": True, "fsdp_config": {"version": 3}}, {}, "version must be 1 or 2; got 3"),
        ({"fsdp": True, "fsdp_config": "gone.json"}, {}, "there is no file 'gone.json'"),
        ({"deepspeed": "gone.json"}, {}, "there is no file 'gone.json'"),
        ({"deepspeed": "x" * 5000}, {}, "there is no file"),
        ({"deepspeed": {"zero_optimization": {"stage": 4}}}, {}, "stage must be 0, 1, 2 or 3; got 4"),
        ({"deepspeed": {"zero_optimization": 3}}, {}, "zero_optimization must be a mapping"),
        ({"accelerate_config": "single_gpu"}, {"num_processes": 4}, "accelerate starts one process"),
        ({"num_processes": "four"}, {}, "num_processes must be a whole number"),
        ({"num_processes": 0}, {}, "num_processes must be from 1 to 4096"),
        ({"launch": {"shard": "ddp"}}, {}, "launch.shard; launch takes ranks, sharding, .*accelerate_config: FILE"),
        ({"launch": {"sharding": "ddp", "offload": "parameters"}}, {}, "ddp cannot offload"),
        ({"launch": 8}, {}, "launch must be a mapping"),
        ({"accelerate_config": "fsdp2", "num_machines": 3}, {}, "must be a multiple of num_machines=3"),
    ],
)
def test_what_cannot_hold_together_is_one_clear_line(
    values: dict[str, object], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read(values, **options)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) <= 300


def test_a_word_of_torchrun_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE must be 1 or more; got 'many'"):
        read({}, {"WORLD_SIZE": "many"})


def test_other_trainers_keep_keys_of_the_same_names() -> None:
    values = {"gradient_clipping": 1.0, "mixed_precision": "bf16", LAUNCH: {"ranks": 2}}
    found = launched(values, of=profile("verl"), environment=NOWHERE)
    assert found.values == {"gradient_clipping": 1.0, "mixed_precision": "bf16"}
    assert found.launch.ranks == 2


def test_a_recipe_of_a_plain_trainer_says_its_launch_by_the_keys_of_transformers() -> None:
    values = {"gradient_clipping": 1.0, "deepspeed": {"zero_optimization": {"stage": 3}}}
    found = launched(values, of=profile("hf"), environment=NOWHERE)
    assert found.values == {"gradient_clipping": 1.0}
    assert found.launch.sharding == "zero3"


def test_the_flags_that_are_read_are_flags_of_accelerate() -> None:
    from accelerate.commands.launch import launch_command_parser

    known = {name.lstrip("-").replace("-", "_") for a in launch_command_parser()._actions for name in a.option_strings}
    asked = {name for names in FLAGS.values() for name in names} | set(TYPES)
    assert asked <= known


def test_transformers_reads_cpu_offload_and_not_offload_params(tmp_path: Path) -> None:
    found = launched({"fsdp": True, "fsdp_config": {"offload_params": True}, "num_processes": 2})
    assert found.launch.offload == "none"
    assert "fsdp_config.offload_params has no effect: transformers reads cpu_offload" in found.notes
    assert launched({"fsdp": True, "fsdp_config": {"cpu_offload": True}, "num_processes": 2}).launch.offload != "none"
    path = tmp_path / "offloads.yaml"
    inner = {"fsdp_version": 2, "fsdp_offload_params": True}
    path.write_text(yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": inner}))
    both = {"accelerate_config": str(path), "fsdp": True, "fsdp_config": {"cpu_offload": False}}
    assert launched(both).launch.offload == "parameters"  # false is not passed on


@pytest.mark.parametrize("policy", ["transformer_based_wrap", None])
def test_transformers_takes_a_policy_in_capitals_only(policy: object) -> None:
    with pytest.raises(
        ConfigError, match="auto_wrap_policy must be TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP"
    ):
        launched({"fsdp": True, "fsdp_config": {"auto_wrap_policy": policy}, "num_processes": 2})


def test_an_accelerate_config_without_a_type_starts_one_process(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    path.write_text("distributed_type:\nnum_processes: 2\n")
    found = launched({"accelerate_config": str(path)})
    assert found.launch.ranks == 1
    assert "accelerate starts one process" in str(found.notes)


@pytest.mark.parametrize("given", [{}, {"gradient_accumulation_steps": 4}])
def test_what_is_written_leaves_the_accumulation_to_transformers(given: dict[str, object], tmp_path: Path) -> None:
    """transformers refuses an accumulation of DeepSpeed's that is not the recipe's; accelerate takes none for 1."""
    from recipes import grpo_recipe

    recipe = grpo_recipe(gradient_accumulation_steps=4)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, **given}))
    launch = launched({"deepspeed": str(path), "num_processes": 2}).launch.batching(recipe.resolved, recipe.keys)
    zero = launch.to_accelerate()["deepspeed_config"]
    assert isinstance(zero, dict)
    assert json.loads(zero["deepspeed_config_file"])["gradient_accumulation_steps"] == "auto"
    inner = {"zero_stage": 2, "gradient_accumulation_steps": 8}
    plain = Launch.of_accelerate({"distributed_type": "DEEPSPEED", "deepspeed_config": inner}, what="it")
    assert "gradient_accumulation_steps" not in str(plain.to_accelerate())


@pytest.mark.parametrize(("optimizer", "told"), [("none", True), ("cpu", False)])
def test_parameters_alone_in_host_memory_are_said_to_take_the_optimizer_along(
    optimizer: str, told: bool, tmp_path: Path
) -> None:
    path = tmp_path / "zero3.yaml"
    inner = {"zero_stage": 3, "offload_param_device": "cpu", "offload_optimizer_device": optimizer}
    path.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": inner}))
    assert ("take the optimizer's state along" in str(launched({"accelerate_config": str(path)}).notes)) is told


def test_numbers_in_quotes_count_and_wrong_ones_are_named_as_the_user_named_them(tmp_path: Path) -> None:
    path = tmp_path / "quoted.yaml"
    inner = {"zero_stage": "3"}
    config = {"distributed_type": "DEEPSPEED", "num_processes": "4", "deepspeed_config": inner}
    path.write_text(yaml.safe_dump(config))
    launch = launched({"accelerate_config": str(path)}).launch
    assert (launch.ranks, launch.sharding) == (4, "zero3")
    path.write_text(yaml.safe_dump({**config, "num_machines": 0}))
    with pytest.raises(ConfigError, match="num_machines must be from 1 to 4096; got 0"):
        launched({"accelerate_config": str(path)})
