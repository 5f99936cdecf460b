"""Settings with two names: a recipe, a space and a knob mean the same by either, with the TRL that is installed.

What a recipe really means is asked of TRL itself here: its own parser, its own script, its own trainer.
"""

import importlib
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from at_once import probed
from recipes import grpo_recipe

from autofit.errors import ConfigError
from autofit.plugin.protocol import Task, WorstCase
from autofit.plugin.registry import load
from autofit.probing.fork_server import ForkServer
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus
from autofit.recipe.keys import RENAMED
from autofit.recipe.recipe import Recipe, merge, tuned_yaml
from autofit.recipe.yaml_file import accepts
from autofit.space.knob import read_space
from autofit.space.space import Knob, Space
from autofit.trainers.names import installed, one_name_each, parser_of, renamed, synonyms

TRAINERS = ["grpo", "sft", "dpo", "reward", "rloo", "hf"]
IN_CI = ("grpo", "hf")  # a trainer of TRL, and one of ours, whose cases the default tests have
EACH = [name if name in IN_CI else pytest.param(name, marks=pytest.mark.slow) for name in TRAINERS]
OLD, NEW = "gradient_checkpointing", "activation_checkpointing"
TWO_VALUES: list[tuple[Any, Any]] = [(True, False), (2.5, 3.5), ({"use_reentrant": False}, {"use_reentrant": True})]


def written(trainer: str, folder: Path, model: Path, **changes: object) -> Path:
    """The tiny recipe of `trainer` with `changes`."""
    folder.mkdir(parents=True, exist_ok=True)
    if trainer in ("grpo", "rloo"):
        return tiny.write_recipe(folder, model, gradient_accumulation_steps=4, **changes)
    return tiny.write_offline_recipe(trainer, folder, model, **changes)


def read(
    trainer: str, path: Path, server: ForkServer, *, device: str = "cpu", changes: Mapping[str, object] | None = None
) -> Recipe:
    return prepare(path, trainer=trainer, device=device, folder=path.parent / "i", server=server, changes=changes)


def meant(trainer: str, path: Path, names: typing.Iterable[str]) -> dict[str, object]:
    """{name: the value that the trainer's own parser reads from `path`}."""
    parser = parser_of(trainer)
    parts = parser.parse_args_and_config(["--config", str(path)])
    return {name: next(getattr(part, name) for part in parts if hasattr(part, name)) for name in names}


def two_values(trainer: str, name: str) -> tuple[Any, Any]:
    kinds = parser_of(trainer).dataclass_types
    hint = next(typing.get_type_hints(kind)[name] for kind in kinds if name in {f.name for f in fields(kind)})
    return next(two for two in TWO_VALUES if all(accepts(value, hint) for value in two))


def tuned(path: Path, recipe: Recipe, changes: Mapping[str, object]) -> Path:
    """The YAML that a promotion writes, in a file."""
    written = path.with_name("tuned.yaml")
    written.write_text(tuned_yaml(recipe.values, changes, comment="tuned"))
    return written


# -- every setting with two names, on every trainer -------------------------------------------------------------------


@pytest.mark.parametrize(
    "trainer",
    [pytest.param(name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.thorough) for name in TRAINERS],
)
def test_a_setting_means_the_same_by_either_name(
    trainer: str, tmp_path: Path, tiny_model: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    groups = {new: older[0] for new, older in synonyms(trainer).items()}
    values = {new: two_values(trainer, new) for new in groups}
    first, last = ({new: two[i] for new, two in values.items()} for i in (0, 1))

    def by_old(given: dict[str, object]) -> dict[str, object]:
        return {groups[new]: value for new, value in given.items()}

    variants: dict[str, dict[str, object]] = {
        "neither": {}, "old": by_old(last), "new": last, "agree": by_old(last) | last,
        "contradict": by_old(first) | last, "contradict-again": by_old(last) | first,
    }  # fmt: skip
    plain = {new: two for new, two in values.items() if not isinstance(two[0], dict)}
    spaces = [{name: {"tier": "neutral", "values": list(plain[new])} for new, name in called.items() if new in plain}
              for called in (groups, {new: new for new in groups})]  # fmt: skip
    candidates = {}
    for variant, given in variants.items():
        path = written(trainer, tmp_path / variant, tiny_model, **given)
        monkeypatch.chdir(path.parent)
        recipe = read(trainer, path, fork_server)
        really = meant(trainer, path, groups)
        used = {new: old if variant == "old" else new for new, old in groups.items()}
        assert {new: recipe.resolved[used[new]] for new in groups} == really, variant
        assert len(recipe.notes) == (0 if variant in ("neither", "old", "new") else len(groups))
        one_name_only = {name for new, old in groups.items() for name in (new, old) if name != used[new]}
        assert not one_name_only & {*recipe.values, *recipe.resolved, *recipe.compared}
        if not plain:
            continue
        by_either = [Space.of(recipe, read_space(space, trainer=trainer)) for space in spaces]
        assert by_either[0] == by_either[1]
        space = by_either[0]
        assert [knob.name for knob in space.knobs] == [used[new] for new in plain]
        candidates[variant] = list(space.candidates())
        assert len(candidates[variant]) >= 2 ** len(plain)
        for candidate in candidates[variant]:
            wanted = dict(zip(plain, candidate.values, strict=True))
            changes = space.yaml_changes(candidate)
            file = tuned(path, recipe, changes)
            assert meant(trainer, file, plain) == wanted, (variant, changes)
            assert not one_name_only & {*yaml.safe_load(file.read_text()), *changes}
    assert candidates.get("old") == candidates.get("new") == candidates.get("agree")


@pytest.mark.parametrize("trainer", EACH)
def test_the_real_trainer_gets_what_a_candidate_means(
    trainer: str, tmp_path: Path, tiny_model: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [OLD, *([NEW] if NEW in synonyms(trainer) else [])]:
        path = written(trainer, tmp_path / name, tiny_model, **{name: True})
        monkeypatch.chdir(path.parent)
        monkeypatch.syspath_prepend(str(path.parent))
        recipe = read(trainer, path, fork_server)
        space = Space.of(recipe, (Knob(name=OLD, tier="neutral", values=(True, False)),))
        changes = space.yaml_changes(space.candidate({name: False}))
        assert changes == {name: False}
        case = WorstCase(path=worst_case_path(path.parent / "i"))
        task = Task(device="cpu", output=tmp_path / "out", worst_case=case, steps=1)
        run = load(trainer).build(merge(recipe.values, changes), task)
        args = run.trainer.args  # type: ignore[attr-defined]
        assert (getattr(args, NEW, False), args.gradient_checkpointing) == (False, False)


def simulated(trainer: str, path: Path, server: ForkServer) -> ProbeResult:
    if getattr(importlib.import_module("trl.trainer.utils"), "_ChunkedLogProbFunction", 1) is None:
        pytest.skip("TRL 1.15 has the loss of a GPU only where Triton is installed")
    recipe = read(trainer, path, server, device="sim:a100-40gb")
    request = ProbeRequest(
        folder=path.parent / "p", trainer=trainer, values=recipe.values, device="sim:a100-40gb", limit_bytes=None,
        worst_case=worst_case_path(path.parent / "i"), server_socket=server.socket_path,
    )  # fmt: skip
    result = probed(request)
    assert result.status is ProbeStatus.FIT, result.reason
    return result


@pytest.mark.thorough  # CI has what the real trainer gets by either name, of every trainer
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_simulated_card_sees_the_same_bytes_by_either_name(
    trainer: str, tmp_path: Path, tiny_model: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if NEW not in synonyms(trainer):
        pytest.skip(f"{installed()} has one name for it")
    found = {}
    for name, on in ((OLD, False), (NEW, False), *([(NEW, True)] if trainer == "sft" else [])):
        path = written(trainer, tmp_path / f"{name}-{on}", tiny_model, **{name: on})
        monkeypatch.chdir(path.parent)
        result = simulated(trainer, path, fork_server)
        found[name, on] = (result.peak_allocated_bytes, result.least_capacity_bytes, result.step_s, result.categories)
    assert found[OLD, False] == found[NEW, False]
    assert found[OLD, False] != found.get((NEW, True))


# -- what the user gives besides the recipe ---------------------------------------------------------------------------


def test_a_value_set_on_the_command_line_wins_by_either_name(
    tmp_path: Path, tiny_model: Path, fork_server: ForkServer
) -> None:
    newest = NEW if NEW in synonyms("sft") else OLD
    for given, changed in ((newest, OLD), (OLD, newest)):
        path = written("sft", tmp_path / given, tiny_model, **{given: True})
        recipe = read("sft", path, fork_server, changes={changed: False})
        assert (recipe.resolved[changed], recipe.values[changed], recipe.notes) == (False, False, ())
        assert given == changed or given not in recipe.values
    path = written("sft", tmp_path, tiny_model, model_init_kwargs={"attn_implementation": "eager"})
    recipe = read("sft", path, fork_server, changes={"attn_implementation": "sdpa"})
    assert recipe.resolved["attn_implementation"] == "sdpa"
    assert "model_init_kwargs" not in recipe.values


def test_a_space_has_one_knob_for_a_setting_and_a_scaled_key_may_go_by_either_name() -> None:
    recipe = replace(grpo_recipe(), other_names={"rank": "lora_r", "alpha": "lora_alpha"}, version="TRL 9")
    space = Space.of(recipe, (Knob(name="rank", tier="neutral", values=(8,), scales=("alpha",)),))
    assert space.changes(space.candidate({"lora_r": 8})) == {"lora_r": 8, "lora_alpha": 16}
    with pytest.raises(ConfigError, match="one knob for lora_r, by any of its names"):
        Space.of(recipe, tuple(Knob(name=name, tier="neutral", values=(8,)) for name in ("rank", "lora_r")))
    with pytest.raises(ConfigError, match=r"trainer grpo \(TRL 9\); unknown: lora_rr; the nearest valid one is"):
        Space.of(recipe, (Knob(name="lora_rr", tier="neutral", values=(8,)),))


def test_the_user_reads_which_of_two_contradicting_names_is_used() -> None:
    if NEW not in synonyms("sft"):
        pytest.skip(f"{installed()} has one name for it")
    named = one_name_each("sft", {OLD: True, NEW: False}, {OLD: False, NEW: False, **dict.fromkeys(KWARGS)})
    (note,) = named.notes
    assert note == f"{OLD}: True and {NEW}: False are one setting by two names; {installed()} uses False, kept as {NEW}"
    recipe = replace(grpo_recipe(), notes=named.notes)
    assert ("note", note) in recipe.describe()


KWARGS = (f"{OLD}_kwargs", f"{NEW}_kwargs")


# -- names that the installed versions do not take --------------------------------------------------------------------


@pytest.mark.parametrize("trainer", EACH)
def test_a_key_by_a_name_of_another_version_is_told_its_name_here(trainer: str, tmp_path: Path) -> None:
    kinds = parser_of(trainer).dataclass_types
    known = {f.name for kind in kinds for f in fields(kind)}
    foreign = {name: other for pair in RENAMED for name, other in (pair, pair[::-1]) if not {name} & known and
               other in known}  # fmt: skip
    assert {"evaluation_strategy", "no_cuda", "torch_dtype", "warmup_ratio"} <= set(foreign)
    whose = "the trainer hf" if trainer == "hf" else f"`trl {trainer} --config`"
    for name, other in foreign.items():
        assert renamed(name, known) == other
        with pytest.raises(ConfigError) as told:
            load(trainer).parse({name: 1}, overrides={})  # type: ignore[attr-defined]
        assert str(told.value) == (
            f"every key must be one that {whose} takes ({installed()}): unknown key {name!r} "
            f"is called {other!r} here: use {other!r}"
        )


@pytest.mark.parametrize("trainer", EACH)
def test_what_a_candidate_writes_is_not_deprecated_unless_the_recipe_uses_it(
    trainer: str, tmp_path: Path, tiny_model: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(trainer, tmp_path, tiny_model)
    monkeypatch.chdir(tmp_path)
    recipe = read(trainer, path, fork_server)
    space = Space.of(recipe, (Knob(name=OLD, tier="neutral", values=(True, False)),))
    file = tuned(path, recipe, space.yaml_changes(next(c for c in space.candidates() if c.values == (False,))))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert meant(trainer, file, [OLD]) == {OLD: False}
    assert [str(w.message) for w in said if "checkpointing" in str(w.message)] == []


def test_a_rename_of_tomorrow_is_read_from_the_deprecated_field(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser
    from trl.scripts import sft

    @dataclass
    class Tomorrow(SFTConfig):  # type: ignore[misc]
        max_length: int | None = field(default=None, metadata={"help": "Deprecated, use `max_tokens` instead."})
        max_tokens: int | None = field(default=None, metadata={"help": "Tokens of a sample."})
        pad_token: str | None = field(default=None, metadata={"help": "Deprecated. `max_tokens` has no part in it."})

        def __post_init__(self) -> None:
            self.max_tokens = self.max_length if self.max_tokens is None else self.max_tokens
            super().__post_init__()

    monkeypatch.setattr(sft, "make_parser", lambda: TrlParser((ScriptArguments, Tomorrow, ModelConfig)))
    synonyms.cache_clear()
    try:
        assert {new: old for new, old in synonyms("sft").items() if "max" in new} == {"max_tokens": ("max_length",)}
    finally:
        monkeypatch.undo()
        synonyms.cache_clear()


# -- the same setting in another place --------------------------------------------------------------------------------


def script_gives_model(trainer: str, path: Path) -> dict[str, object]:
    """The `model_init_kwargs` with which TRL's own script would make its trainer; it stops for want of a dataset."""
    script = importlib.import_module(f"trl.scripts.{trainer}")
    without = path.with_name("without-data.yaml")
    left_out = ("dataset_name", "reward_funcs")
    values = {k: v for k, v in yaml.safe_load(path.read_text()).items() if k not in left_out}
    without.write_text(yaml.safe_dump(values))
    parts = script.make_parser().parse_args_and_config(["--config", str(without)])
    with pytest.raises(ValueError, match="dataset"):
        script.main(*parts)
    return dict(parts[1].model_init_kwargs)


@pytest.mark.parametrize("trainer", [each for each in EACH if each != "hf"])
def test_a_knob_acts_where_the_recipe_gives_the_setting_inside_model_init_kwargs(
    trainer: str, tmp_path: Path, tiny_model: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inner = {"attn_implementation": "eager", "torch_dtype": "float16", "use_cache": False}
    path = written(trainer, tmp_path, tiny_model, attn_implementation="sdpa", model_init_kwargs=inner)
    recipe = read(trainer, path, fork_server)
    before = script_gives_model(trainer, path)
    assert recipe.resolved["attn_implementation"] == before["attn_implementation"]
    assert recipe.resolved["dtype"] == before["dtype"] == "float32"  # from_pretrained prefers it to torch_dtype
    assert recipe.notes
    space = Space.of(recipe, (Knob(name="attn_implementation", tier="neutral", values=("eager", "sdpa")),))
    for candidate in space.candidates():
        after = script_gives_model(trainer, tuned(path, recipe, space.yaml_changes(candidate)))
        wanted = {**before, "attn_implementation": candidate.values[0]}
        assert {k: v for k, v in after.items() if k != "torch_dtype"} == {
            k: v for k, v in wanted.items() if k != "torch_dtype"
        }
