"""Child process: a model from the model hub, or out of a GGUF file, in a folder. Run with `python -m`."""

import argparse
from pathlib import Path

_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
_FILES += ["chat_template.jinja", "special_tokens_map.json", "vocab.json", "merges.txt"]


def convert(gguf: Path, folder: Path) -> None:
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


def main() -> None:
    """`ask REPO` fails unless the hub answers; `fetch REPO FOLDER` downloads; `convert GGUF FOLDER` converts a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("ask", "fetch", "convert"))
    parser.add_argument("source")
    parser.add_argument("folder", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.action == "convert":
        convert(Path(arguments.source), arguments.folder)
        return

    from huggingface_hub import HfApi, snapshot_download

    if arguments.action == "ask":
        HfApi().model_info(arguments.source, timeout=3)
    else:
        snapshot_download(arguments.source, local_dir=arguments.folder, allow_patterns=_FILES)


if __name__ == "__main__":
    main()
