"""The cost of a shared database: `python experiments/shared_studies/cost.py URL [TRIALS] [SEARCHES]`.

Each search is a process with probes that answer at once. Prints, of each: trials, seconds a trial, statements a trial,
seconds in statements a trial, and statements a poll while a probe works. URL is a Postgres, `sqlite` for a file, or
`postgres` for a server of its own, where Debian's package is installed.
"""

import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))


def one(url: str, trials: int, number: int, folder: str) -> str:
    """The line of one search."""
    import sqlalchemy
    from lawful import result_of
    from search_driver import plan

    from autofit.files import write_json
    from autofit.probing.launch import Launcher
    from autofit.probing.result import ProbeRequest
    from autofit.space.knob import load_space
    from autofit.space.space import Space
    from autofit.tuning.search import Search, open_study
    from autofit.tuning.storage import use_storage
    from autofit.tuning.study import driving

    class AtOnce(Launcher):
        def submit(self, request: ProbeRequest) -> None:
            write_json(request.request_path, request.to_json())
            write_json(request.answer_path, result_of(request).to_json())

    count, spent, began = [0], [0.0], [0.0]

    @sqlalchemy.event.listens_for(sqlalchemy.Engine, "before_cursor_execute")
    def before(*_: object) -> None:
        count[0] += 1
        began[0] = time.perf_counter()

    @sqlalchemy.event.listens_for(sqlalchemy.Engine, "after_cursor_execute")
    def after(*_: object) -> None:
        spent[0] += time.perf_counter() - began[0]

    home = Path(folder) / f"person-{number}"
    if url != "sqlite":
        use_storage(home, url)
    wanted = plan(home if url != "sqlite" else Path(folder), trials)
    knobs = tuple(k for k in load_space(None, trainer="grpo") if k.name not in ("quantization", "num_generations"))
    space = Space.of(wanted.recipe, knobs, allow="recipe")  # 468 candidates
    wanted = replace(wanted, study_name=f"law-{number}", sampler="random", space=space)
    with driving(wanted.folder, wanted.name):
        study = open_study(wanted)
        search = Search(wanted, study, server_socket=None, launcher=AtOnce())
        marks: list[tuple[float, int]] = [(time.perf_counter(), count[0])]
        search.on_told = lambda _: marks.append((time.perf_counter(), count[0]))
        search.run()
        done, before_poll = len(marks) - 1, count[0]
        search._progress()
        poll = count[0] - before_poll
    last = marks[-51:]
    spread = marks[-1][0] - marks[0][0], last[-1][0] - last[0][0]
    few = len(last) - 1
    return (
        f"search {number}: {done} trials, {spread[0] / done * 1e3:.0f} ms a trial ({spread[1] / few * 1e3:.0f} of the "
        f"last {few}), {count[0] / done:.0f} statements a trial ({(last[-1][1] - last[0][1]) / few:.0f} of the last "
        f"{few}), {spent[0] / done * 1e3:.1f} ms in statements a trial; {poll} statements a poll"
    )


def main(url: str, trials: int = 300, searches: int = 4) -> None:
    if url == "postgres":
        from postgres_server import server

        with server() as made:
            main(made.new_database("studies"), trials, searches)
        return
    with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(searches) as pool:
        for line in pool.starmap(one, [(url, trials, number, folder) for number in range(searches)]):
            print(line)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
