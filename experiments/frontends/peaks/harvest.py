"""The rows from the tools' own pages: `python -m experiments.frontends.peaks.harvest --ms-swift DIR --qwen DIR`.

DIR is a checkout, or a bare git folder, of modelscope/ms-swift at any commit after 3602360a and of QwenLM/Qwen. Writes
rows.json: facts only (paths, settings, figures). What is typed by hand (Axolotl's READMEs) is in axolotl.yaml.

Rules, written before any prediction:
- ms-swift's scripts: the comment above a script that names GiB, GB or G is a card's most used memory, `N GiB * M`
  that of each of M. 80 is the size of the card, not a measurement. Neither the card nor the tool that read it is said.
- a dataset's lengths are those of ms-swift's own page (tokens of Qwen2.5's tokenizer). Longer samples than max_length
  are left out by ms-swift's default, so the longest has at most max_length. A part (`#500`) has a longest sample
  between mean + 2 deviations and the dataset's longest. UNSURE names datasets of which that page counts the questions
  only.
- the script is read as it was in the commit that wrote the figure: many were changed later (another model, other data).
- a training of samples of known lengths (mean, deviation, ends of each dataset) is predicted over lengths drawn from
  them (`mixed.py`), and has an error; reserved bytes depend on how lengths follow each other.
- rows that ms-swift packs are not padded to max_length: where the lengths of a `swift sft`'s datasets are known, its
  rows' are those of packing samples of such lengths (PACKED at a time, as its PackingDataset did in 2025).
- DDP before torch 2.8 has no error (BROADCAST).
- GB of a figure that nvidia-smi shows are GiB.
- a figure that was written before torch 2.8 came out is of transformers' default of then, the foreach AdamW, which
  holds a copy of the trained weights more in its step (transformers.TrainingArguments.optim: fused from torch 2.8 on).
- CUDA before 12.2 loads every kernel of torch's libraries onto the card (experiments/context/README.md); the rows of
  that time whose figure may be nvidia-smi's have them beside the context (`kernels`). Which CUDA it was: Qwen's README
  says 11.8 with torch 2.0 of its figures, Axolotl's only image of 2023-08 is cu118 with torch 2.0.1
  (.github/workflows/base.yml at dc71d8872), and ms-swift's documents name images of CUDA 12.1 with torch 2.3 alone
  until one of CUDA 12.4 on EAGER_UNTIL (5f28da9e8).
- Axolotl's allocator settings are those of the day (ROUNDED and GROWING: its utils/__init__.py). Its figures since
  LOGGED are torch's reserved bytes: examples/gpt-oss/README.md says so of its own, which are of that day.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import yaml

from experiments.frontends.peaks.rows import HERE, ROWS, Part

SWIFT, BENCHMARK, QWEN = "3602360a", "cdb169b781", "712d922e"
PAGE = "docs/source_en/Instruction/Supported-models-and-datasets.md"
FIGURE = re.compile(
    r"^#\s*(?:GPU [Mm]emory:\s*)?(?P<label>[^:#\d]*:\s*)?(?:(?P<cards>\d+)\s*\*\s*)?"
    r"(?P<size>\d+(?:\.\d+)?)\s*(?:GiB|GB|G)\b"
    r"(?:\s*\*\s*(?P<after>\d+))?(?:.*?(?P<step>\d+(?:\.\d+)?)\s*s/it)?",
)
FUSED = "2025-08-06"  # torch 2.8
GROWING, ROUNDED = "2024-07-16", "2026-03-24"  # expandable_segments from, roundup_power2_divisions until (torch 2.9)
LOGGED = "2025-08-06"  # `device_mem_reserved(gib)` in Axolotl's logs
EAGER_UNTIL = "2025-04-08"  # from that day ms-swift's documents name images of CUDA 12.4
# Bytes of all kernels that an A100 loads, by experiments/context/kernel_bytes.py: libtorch_cuda, cuBLAS and cuBLASLt of
# torch 2.0.1 (cu117) and of 2.4.1 (cu121); NCCL 2.20.5, which torch 2.3 and 2.4 have, where there are several ranks
KERNELS_2_0, KERNELS_2_4, KERNELS_NCCL = 872_600_000, 1_065_000_000, 98_800_000
PACKED = 128  # PackingDataset's packing_interval
UNSURE = ("110k-SFT", "NuminaMath", "OpenThoughts", "scidocs", "stsb", "DAMO_NLP/jd")  # answers or pairs not counted
BROADCAST = ("DDP's first broadcast: torch before 2.8 keeps copies of weights until NCCL's stream has caught up with "
             "the host, so that between nothing and the whole model is held once more")  # fmt: skip
SAME_SHAPE = {f"Qwen/Qwen3-{kind}-4B": "Qwen/Qwen3-4B" for kind in ("Embedding", "Reranker")}  # made from it
# Shapes that the catalogue lacks; QWEN_1 is Qwen's first generation, of which Qwen1.5 has the same tensors
QWEN_1 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "rms_norm_eps": 1e-6,
          "max_position_embeddings": 32768, "tie_word_embeddings": False, "use_sliding_window": False,
          "hidden_act": "silu", "torch_dtype": "bfloat16", "rope_theta": 10000.0}  # fmt: skip


def qwen_1(hidden: int, layers: int, heads: int, inner: int) -> dict[str, object]:
    """The config of a model of Qwen's first generation, as Qwen2 says it."""
    return {**QWEN_1, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": heads, "intermediate_size": inner}  # fmt: skip


def yi(hidden: int, layers: int, heads: int, inner: int, keys: int) -> dict[str, object]:
    """The config of a Yi model (a Llama)."""
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64000, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096, "tie_word_embeddings": False, "attention_bias": False,
            "hidden_act": "silu", "torch_dtype": "bfloat16", "rope_theta": 5000000.0,
            "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": keys, "intermediate_size": inner}  # fmt: skip


THEN = "experiments.frontends.peaks.then:TRAINER"
SHAPES = {
    "1.8B": qwen_1(2048, 24, 16, 5504), "7B": qwen_1(4096, 32, 32, 11008), "14B": qwen_1(5120, 40, 40, 13696),
    "yi-6b-chat": yi(4096, 32, 32, 11008, 4), "yi-34b-chat": yi(7168, 60, 56, 20480, 8),
}  # fmt: skip
SHAPES |= {f"qwen-{name.lower().replace('.', '_')}-chat": SHAPES[name] for name in ("1.8B", "7B", "14B")}


def text_of(folder: Path, path: str, commit: str) -> str:
    """A file of a checkout or of a bare repository at a commit."""
    return subprocess.run(["git", "-C", str(folder), "show", f"{commit}:{path}"], check=True, capture_output=True,
                          text=True).stdout  # fmt: skip


# -- ms-swift's scripts -----------------------------------------------------------------------------------------------


def datasets(folder: Path) -> dict[str, Part]:
    """Rows, mean, deviation, fewest and most tokens of each dataset of ms-swift's page."""
    found = {}
    for line in text_of(folder, PAGE, SWIFT).splitlines():
        name = re.match(r"\|\[([^\]]+)\]", line)
        counts = re.search(r"\|(\d+)\|([\d.]+)±([\d.]+), min=(\d+), max=(\d+)\|", line)
        if name and counts:
            found[name[1]] = (int(counts[1]), float(counts[2]), float(counts[3]), int(counts[4]), int(counts[5]))
    return found


def parts_of(text: str, known: dict[str, Part]) -> tuple[list[tuple[Part, bool]], str]:
    """The datasets that a script names, with as many samples as it takes, and whether that is all; else why not."""
    named = re.search(r"--dataset\s+(.+?)\\\s*\n\s*--", text, re.DOTALL)
    parts = re.findall(r"[\w./:-]+/[\w./:#-]+", named[1]) if named else []
    found: list[tuple[Part, bool]] = []
    for part in parts:
        name, _, count = part.partition("#")
        name = name.removeprefix("HF::").split(":")[0]
        if name not in known or any(word in name for word in UNSURE):
            return [], f"{name}: its lengths are not known"
        rows, *rest = known[name]
        found.append(((int(count or rows), *rest), not count or int(count) >= rows))  # type: ignore[arg-type]
    return found, "" if found else "no dataset is named"


def longest(text: str, known: dict[str, Part]) -> tuple[tuple[int, int] | None, str, list[Part]]:
    """(Fewest, most) tokens of the longest sample that a script trains on, how that is known, and what to draw from."""
    limit = re.search(r"--max_length\s+(\d+)", text)
    most = int(limit[1]) if limit else None
    parts, why = parts_of(text, known)
    if re.search(r"--packing\s+true", text) and most:
        sft = re.search(r"\bswift sft\b", text)
        return (most, most), "packed to max_length", [part for part, _ in parts] if sft else []
    if not parts:
        return None, why, []
    ends = []
    for (_, mean, deviation, _, top), whole in parts:
        capped = min(top, most) if most else top
        ends.append((capped if whole else min(mean + 2 * deviation, capped), capped))
    ranged = (int(max(low for low, _ in ends)), int(max(high for _, high in ends)))
    if "swift rlhf" in text:
        if most and most > ranged[0]:
            ranged = (ranged[0], most)
        return ranged, "the page counts the chosen answers; the rejected ones may be longer", []
    how = "the datasets' own, by ms-swift's page" + ("" if ranged[0] == ranged[1] else "; a part of them")
    return ranged, how, [part for part, _ in parts]


def scripts(folder: Path) -> Iterator[dict[str, object]]:
    """Scripts under examples/train of text models, with a figure."""
    known = datasets(folder)
    listed = subprocess.run(["git", "-C", str(folder), "ls-tree", "-r", "--name-only", SWIFT, "examples/train"],
                            check=True, capture_output=True, text=True).stdout.split("\n")  # fmt: skip
    for path in listed:
        if not path.endswith(".sh") or "multimodal" in path:
            continue
        blamed = written(folder, path)
        today = text_of(folder, path, SWIFT)
        for count, line in enumerate(line for line in today.splitlines() if line.startswith("#")):
            found = FIGURE.match(line)
            if found is None or float(found["size"]) == 80:
                continue
            date, commit, then = blamed[line]
            text = text_of(folder, then, commit)
            lengths, how, samples = longest(text, known)
            label = (found["label"] or "").strip(" :")
            changes: dict[str, object] = {}
            if date < FUSED and "--optim" not in text and "--optimizer" not in text:
                changes["optim"] = "adamw_torch"
            model = re.search(r"^\s*--model\s+(\S+)", text, re.MULTILINE)
            if model and model[1] in SAME_SHAPE:
                changes["model_name_or_path"] = SAME_SHAPE[model[1]]
            ranks = int(found["cards"] or found["after"] or 1)
            shared = any(word in text for word in ("deepspeed", "fsdp", "device_map"))
            undecided = BROADCAST if ranks > 1 and not shared and date < FUSED else ""
            name = path.removeprefix("examples/train/").removesuffix(".sh") + (f" ({label})" if label else "")
            yield {
                "name": f"ms-swift/{name}" + ("" if label or not count else f" ({count})"), "tool": "ms-swift",
                "version": SWIFT, "source": f"{path}, its comment", "date": date,
                "measured_gib": float(found["size"]), "half_digit_gib": half_digit(found["size"]),
                "kind": "reserved or nvidia-smi", "file": path, "commit": commit[:12], "path": then, "ranks": ranks,
                "longest_tokens": lengths, "lengths": how, "samples": samples, "changes": changes,
                **({"packed_together": PACKED} if samples and how.startswith("packed") else {}),
                "undecided": undecided,
                "measured_step_s": float(found["step"]) if found["step"] else None,
            }  # fmt: skip


def written(folder: Path, path: str) -> dict[str, tuple[str, str, str]]:
    """Of each line of a file the day on which it was written, that commit, and the file's path then."""
    blame = subprocess.run(["git", "-C", str(folder), "blame", "--date=short", "--porcelain", SWIFT, "--", path],
                           check=True, capture_output=True, text=True).stdout  # fmt: skip
    days: dict[str, str] = {}
    names: dict[str, str] = {}
    found: dict[str, tuple[str, str, str]] = {}
    commit = ""
    for line in blame.splitlines():
        if re.match(r"[0-9a-f]{40} ", line):
            commit = line[:40]
        elif line.startswith("author-time "):
            days[commit] = datetime.fromtimestamp(int(line.split()[1]), UTC).date().isoformat()
        elif line.startswith("filename "):
            names[commit] = line.removeprefix("filename ")
        elif line.startswith("\t"):
            found[line[1:]] = days[commit], commit, names[commit]
    return found


def kernels(row: dict[str, object]) -> int:
    """Bytes of the kernels that CUDA of a row's day loaded without being asked to; 0 since 12.2, and of torch's own."""
    if row["kind"] == "reserved":
        return 0
    if str(row["date"]) < "2024":
        return KERNELS_2_0
    if row["tool"] != "ms-swift" or str(row["date"]) >= EAGER_UNTIL:
        return 0
    return KERNELS_2_4 + (KERNELS_NCCL if int(str(row["ranks"])) > 1 else 0)


def half_digit(text: str) -> float:
    """Half of the last digit that a figure shows."""
    return float(0.5 * 10.0 ** -len(text.partition(".")[2]))


# -- ms-swift's benchmark of 2024-01 ----------------------------------------------------------------------------------

OLD_SWIFT = "torch 2.1.1 and the model's own code of the day (fused c_attn; Qwen1 is said as Qwen2's code)"
NEWS: Part = (4959, 3234.4, 2547.5, 91, 19548)  # cls-fudan-news-zh, by the benchmark's page
PLAIN = {
    "objective": "sft", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "dtype": "bfloat16",
    "bf16": True, "max_length": 2048, "gradient_checkpointing": True, "optim": "adamw_torch",
    "gradient_checkpointing_kwargs": {"use_reentrant": True}, "attn_implementation": "flash_attention_2",
}  # fmt: skip
# ms-swift of then makes every checkpoint one without re-entrance (`fix_gradient_checkpointing_warning` in its
# swift/llm/utils/model.py at 4312aeb28, which wrote the figures); of copies of the logits see `shift` in then.py
BENCHMARKED = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
LORA = {"use_peft": True, "lora_r": 8, "lora_alpha": 32, "lora_dropout": 0.05, "adapter_dtype": "float32",
        "lora_target_modules": ["q_proj", "k_proj", "v_proj"]}  # fmt: skip


def cells(page: str) -> Iterator[tuple[list[str], list[str]]]:
    """(Heads, cells) of each row of a page's HTML tables, cells of several rows repeated."""
    for table in re.findall(r"<table>(.*?)</table>", page, re.DOTALL):
        held: list[tuple[int, str]] = []
        heads: list[str] = []
        for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL):
            cells_of = re.findall(r"<td(?:\s+rowspan=\"(\d+)\")?>(.*?)</td>", row, re.DOTALL)
            found = [(int(span or 1), re.sub(r"\s+", " ", text).strip()) for span, text in cells_of]
            if not heads:
                heads = [text for _, text in found]
                continue
            if len(found) < len(heads) and held:
                found = [held[0], *found]
            held = [found[0]]
            yield heads, [text for _, text in found]


def benchmark(folder: Path) -> Iterator[dict[str, object]]:
    """Rows of one card of docs/source_en/LLM/Benchmark.md whose model has a shape here."""
    for heads, row in cells(text_of(folder, "docs/source_en/LLM/Benchmark.md", BENCHMARK)):
        said = dict(zip(heads, row, strict=False))
        model, memory, speed = row[0], said.get("GPU Memory (GiB)", ""), said.get("Training Speed (samples/s)", "")
        full = heads[0] == "Model Type [FULL]"
        settings = row[1 : heads.index("Training Speed (samples/s)")] if speed else []
        if model not in SHAPES or not re.fullmatch(r"[\d.]+", memory) or "gptq" in str(settings):
            continue
        recipe: dict[str, object] = {**PLAIN, **({} if full else LORA), **BENCHMARKED}
        if model.startswith("yi"):
            recipe |= {} if full else {"lora_target_modules": ["q_proj", "k_proj", "v_proj"]}
        length = 2048
        for head, value in zip(heads[1:], settings, strict=False):
            match head:
                case "Max Length":
                    length = int(value)
                    recipe["max_length"] = length
                case "Batch Size":
                    recipe["per_device_train_batch_size"] = int(value)
                case "Gradient Accumulation Steps":
                    recipe["gradient_accumulation_steps"] = int(value)
                case "Use Flash Attn":
                    recipe["attn_implementation"] = "flash_attention_2" if "2714" in value else "eager"
                case "Gradient Checkpointing":
                    recipe["gradient_checkpointing"] = "2714" in value
                case "LoRA Rank":
                    recipe["lora_r"] = int(value)
                case "LoRA Target Modules" if value.startswith("ALL"):
                    recipe["lora_target_modules"] = ["all-linear"]
                case "Quantization" if "bnb" in value:
                    recipe |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
        micro, steps = (int(str(recipe[k])) for k in ("per_device_train_batch_size", "gradient_accumulation_steps"))
        words = ", ".join(
            f"{h} {'yes' if '2714' in v else 'no' if '2718' in v else v}"
            for h, v in zip(heads[1:], settings, strict=False)
        )
        yield {
            "name": f"ms-swift-2024/{'full' if full else 'lora'} {model}, {words}", "tool": "ms-swift",
            "version": f"{BENCHMARK} (torch 2.1.1)", "source": "docs/source_en/LLM/Benchmark.md", "date": "2024-01",
            "measured_gib": float(memory), "half_digit_gib": half_digit(memory), "kind": "reserved", "card_said": True,
            "recipe": recipe, "shape": SHAPES[model], "longest_tokens": (length, length),
            "changes": {"shifted_logits": "float32" if model.startswith("yi") else "half"},
            "lengths": "cls-fudan-news-zh: 3234 +- 2548 tokens, 91 to 19548; ms-swift leaves out those over max_length",
            "samples": [NEWS],
            "measured_step_s": round(micro * steps / float(speed), 4), "older": OLD_SWIFT,
        }  # fmt: skip


# -- Qwen's own finetune.py -------------------------------------------------------------------------------------------

# Its LoRA is on c_attn, c_proj (of attention and of the MLP), w1 and w2: all linear layers. Its README asks for
# peft 0.5 with torch 2.0: adapters in float32, trained copies of embeddings and head (emb) in the model's dtype. All
# weights are trained by finetune_ds.sh, with ZeRO-3 and the optimizer that finetune/ds_config_zero3.json asks for:
# DeepSpeed's FusedAdam, which holds no copy of the weights in its step, as torch's fused AdamW does not.
OLD_QWEN = "torch 2.0 and the model's own code of the day; Qwen1 is said as Qwen2's code"


def qwen(folder: Path) -> Iterator[dict[str, object]]:
    """Rows of one card of Qwen's README, without its GPTQ models."""
    page = text_of(folder, "README.md", QWEN)
    table = page[page.rindex("### Profiling of Memory and Speed") :].split("</table>")[0]
    size = ""
    for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL):
        found = re.search(r"<th[^>]*>\s*([\d.]+B)\s*</th>", row)
        size = found[1] if found else size
        data = [re.sub(r"\s+", " ", text).strip() for text in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)]
        if len(data) != 9 or size not in SHAPES or data[0] not in ("LoRA", "LoRA (emb)", "Full-parameter"):
            continue
        if data[1:3] != ["1", "1"]:
            continue
        for length, text in zip((256, 512, 1024, 2048, 4096, 8192), data[3:], strict=True):
            figures = re.fullmatch(r"([\d.]+)G? / ([\d.]+)s/it", text)
            if figures is None:
                continue
            recipe: dict[str, object] = {**PLAIN, "max_length": length, "gradient_accumulation_steps": 8}
            if data[0] == "Full-parameter":
                recipe |= {"launch": {"ranks": 1, "sharding": "zero3"}, "optim": "adamw_torch_fused"}
            else:
                recipe |= {**LORA, "lora_r": 64, "lora_alpha": 16, "lora_target_modules": ["all-linear"]}
            recipe["shifted_logits"] = "half"
            if data[0] == "LoRA (emb)":
                recipe |= {"lora_modules_to_save": ["embed_tokens", "lm_head"], "half_kept": True}
            yield {
                "name": f"qwen/{data[0]} {size}, {length} tokens", "tool": "finetune.py of Qwen", "version": QWEN,
                "source": "README.md, Profiling of Memory and Speed", "date": "2023-11", "card_said": True,
                "measured_gib": float(figures[1]), "half_digit_gib": half_digit(figures[1]), "kind": "not said",
                "recipe": recipe, "shape": SHAPES[size], "longest_tokens": (length, length),
                "lengths": "inputs of this length, micro-batch 1, accumulation 8", "older": OLD_QWEN,
                "measured_step_s": float(figures[2]), "trainer": THEN,
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ms-swift", type=Path, required=True)
    parser.add_argument("--qwen", type=Path, required=True)
    options = parser.parse_args()
    typed = yaml.safe_load((HERE / "axolotl.yaml").read_text("utf-8"))
    shapes, usual = typed["shapes"], typed["usual"]
    rows: list[dict[str, object]] = [*scripts(options.ms_swift)]
    for row in typed["rows"]:
        shape = {"shape": shapes[row.pop("shape")]} if "shape" in row else {}
        path = row["file"].removeprefix("examples/")
        if "commit" in row:
            row |= {"commit": str(row["commit"]), "path": row["file"]}
        row["date"] = str(row.get("date", usual["date"]))
        if row["date"] < ROUNDED:
            settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:16"}
            row["changes"] = {**row.get("changes", {}), "env": None if row["date"] < GROWING else settings}
        if LOGGED <= row["date"] < usual["date"]:
            row["kind"] = "reserved"
        rows.append({**usual, "name": f"axolotl/{path.rpartition('.')[0]}", **row, **shape})
    rows += [*benchmark(options.ms_swift), *qwen(options.qwen)]
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        if loaded := kernels(row):
            row["kernels_bytes"] = loaded
    for begins, why in yaml.safe_load((HERE / "why.yaml").read_text("utf-8")).items():
        for row in rows:
            if str(row["name"]).startswith(begins):
                row["why"] = why
    text = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    ROWS.write_text(f'{{"rows": [\n{text}\n]}}\n', "utf-8")
    print(len(rows), "rows")


if __name__ == "__main__":
    main()
