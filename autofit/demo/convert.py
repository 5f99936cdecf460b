"""Child process: a GGUF file to a folder that `from_pretrained` reads. Run with `python -m`."""

import argparse
from pathlib import Path


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
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    convert(arguments.gguf, arguments.folder)


if __name__ == "__main__":
    main()
