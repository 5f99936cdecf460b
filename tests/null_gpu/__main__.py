"""`python tests/null_gpu [--cards N] [--values] COMMAND...`: run a command that sees N cards of the null GPU."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from null_gpu.build import CannotBuild, NullGpu, build, h100s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/null_gpu", description=__doc__)
    parser.add_argument("--cards", type=int, default=1, help="as many H100s of 80 GB")
    parser.add_argument(
        "--values", action="store_true", help="the CPU computes every tensor's values: small models only"
    )
    parser.add_argument("--home", type=Path, help="the folder of what is compiled (default: a fresh one)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    home = given.home or Path(tempfile.mkdtemp(prefix="null-gpu-"))
    try:
        gpu = NullGpu(libraries=build(home / "libraries"), home=home)
    except CannotBuild as error:
        sys.exit(str(error))
    gpu.has(h100s(given.cards))
    if given.command:
        os.environ.update(gpu.env(values=given.values))
        os.execvp(given.command[0], given.command)


if __name__ == "__main__":
    main()
