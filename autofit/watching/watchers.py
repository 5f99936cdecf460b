"""The watchers of a full run: one list for a promoted run and for the callback in a user's script."""

from collections.abc import Sequence

from autofit.watching.contract_watcher import ContractWatcher
from autofit.watching.guards import GuardWatcher
from autofit.watching.memory import MemoryWatcher
from autofit.watching.progress import ProgressWatcher
from autofit.watching.rewards import RewardWatcher
from autofit.watching.summary import SummaryWatcher
from autofit.watching.thresholds import Guard
from autofit.watching.watcher import Watcher


def watchers(*, guards: Sequence[Guard]) -> list[Watcher]:
    """Everyone who looks at a run, with the guards that are on.

    A watcher is made anew for each start of a run. This list is the only place that names them.
    """
    return [
        SummaryWatcher(guards), RewardWatcher(), ProgressWatcher(), ContractWatcher(), MemoryWatcher(),
        GuardWatcher(guards),
    ]  # fmt: skip
