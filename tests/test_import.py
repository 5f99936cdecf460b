import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("code", ["import autofit", "from autofit.cli import main; main(['--help'])"])
def test_neither_the_package_nor_its_help_loads_anything_heavy(code: str) -> None:
    probe = f"""
import sys
try:
    {code}
except SystemExit:
    pass
heavy = {{"torch", "optuna", "mlflow", "submitit", "transformers", "trl", "numpy", "rich"}} & set(sys.modules)
sys.exit(f"loaded {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_driver_of_a_search_loads_no_torch() -> None:
    modules = "autofit.tuning.search, autofit.promotion.promotion, autofit.api.searching"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_estimate_waits_for_none_of_the_libraries_of_a_search() -> None:
    heavy = "{'optuna', 'scipy', 'sqlalchemy', 'torch'}"
    code = f"import sys, autofit; autofit.estimate; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


IN_A_CLONE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ditable" not in repr(finder)]  # of `pip install -e`
import autofit
assert autofit.__file__.startswith(sys.argv[1]), autofit.__file__
from autofit.recipe.profile import profiles
print(*sorted(profiles()))
import autofit.search_spaces, autofit.trainers.keys
"""


def test_the_trainers_and_spaces_are_found_where_pip_installed_no_editable_package() -> None:
    """Python in the folder of a clone finds its autofit/ before what pip has installed."""
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", IN_A_CLONE, str(root)], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert {"grpo", "sft", "dpo"} <= set(done.stdout.split())
