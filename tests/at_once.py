"""A launcher of probes for tests: answers within the call, with no job and no process."""

from autofit.files import write_json
from autofit.probing.launch import Launcher
from autofit.probing.result import ProbeRequest


class AtOnce(Launcher):
    """Calls its function, such as `lawful.at_once`, with the path of the request that it has written."""

    def submit(self, request: ProbeRequest) -> None:
        write_json(request.request_path, request.to_json())
        self._function(str(request.request_path))
