"""A launcher of probes for tests: answers within the call, with no job and no process."""

from autofit.files import write_json
from autofit.probing.job import run_probe
from autofit.probing.launch import Launcher
from autofit.probing.result import ProbeRequest, ProbeResult


class AtOnce(Launcher):
    """Calls its function, such as `lawful.at_once`, with the path of the request that it has written."""

    def submit(self, request: ProbeRequest) -> None:
        write_json(request.request_path, request.to_json())
        self._function(str(request.request_path))


def probed(request: ProbeRequest) -> ProbeResult:
    """The result of a probe in a child of the request's fork server, without a job: two processes and their imports."""
    assert request.server_socket is not None
    return AtOnce(run_probe).run(request)
