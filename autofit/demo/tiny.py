"""A tiny model that solves part of a task, and a GRPO recipe that improves it within one or two minutes."""

from functools import partial
from pathlib import Path

from autofit.demo.cache import Progress, ensure_built, locked_cache, write_atomically
from autofit.demo.children import run_module
from autofit.demo.recipes import recipe_text, tiny_recipe
from autofit.demo.tasks import DATASET_SEED, bare_prompt, chain_sums, write_splits

DEFAULT_SFT_STEPS = 300


def _quiet(_: str) -> None:
    """Discard the progress message."""


def prepare_tiny(
    cache_dir: Path, *, seed: int = 0, sft_steps: int = DEFAULT_SFT_STEPS, progress: Progress = _quiet
) -> Path:
    """The path of a recipe for `trl grpo --config`, with its model (under 1 M parameters) and data in `cache_dir`.

    The model is first trained for `sft_steps` steps on demonstrations, some of them without an answer; with 0 it keeps
    its random weights.
    """
    cache_dir = cache_dir.expanduser().resolve()
    name = f"tiny-seed{seed}-sft{sft_steps}"
    with locked_cache(cache_dir, progress=progress):
        data = ensure_built(cache_dir / "chain-sum-bare", _build_data, needed_bytes=10_000_000, progress=progress)
        model = ensure_built(
            cache_dir / name,
            partial(_build_model, data=data, seed=seed, sft_steps=sft_steps, progress=progress),
            needed_bytes=10_000_000,
            progress=progress,
        )
        recipe = cache_dir / f"{name}-grpo.yaml"
        write_atomically(recipe, recipe_text(tiny_recipe(model=model, data=data, seed=seed)))
    return recipe


def _build_data(folder: Path) -> None:
    problems = chain_sums(max_terms=3, draws=20_000, seed=DATASET_SEED)
    write_splits(folder, problems, held_out=400, prompt=bare_prompt)


def _build_model(folder: Path, *, data: Path, seed: int, sft_steps: int, progress: Progress) -> None:
    progress(f"training the tiny model on demonstrations, once ({sft_steps} steps)")
    options = {"--data": str(data / "train.jsonl"), "--seed": str(seed), "--steps": str(sft_steps)}
    arguments = [word for pair in options.items() for word in pair]
    run_module("autofit.demo.tiny_sft", [str(folder), *arguments], timeout_s=900)
