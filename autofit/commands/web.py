"""Commands that serve: `autofit web`, a page on 127.0.0.1; `autofit server`, the kept server of imported libraries."""

import argparse
import ipaddress
import threading
import webbrowser
from typing import TYPE_CHECKING

from autofit.commands.common import DONE, NOTHING_FITS, say, show_line, terminate_like_interrupt
from autofit.errors import ConfigError, EnvironmentFault, quoted
from autofit.probing import kept_place, kept_server
from autofit.units import format_seconds

if TYPE_CHECKING:
    from autofit.web.server import Access


def server(options: argparse.Namespace) -> int:
    # Servers of other versions answer too, with their facts.
    told = [answer for path in kept_place.sweep() if (answer := kept_server.ask(path, options.action))]
    for one in told:
        running, whose = (
            int(one.get("running", 0)),
            f"process {one.get('pid')} of {one.get('python', 'another version')}",
        )
        if options.action == "stop":
            show_line(f"stopped {whose}" + (f"; it ends after what it runs ({running})" if running else ""))
        else:
            show_line(
                f"{whose}, up for {format_seconds(one.get('up_s', 0))}: {one.get('commands')} commands, {running} "
                f"running; ends after {format_seconds(one.get('ends_after_s', 0))} without one"
            )
    if not told:
        show_line("no server is kept" + ("" if kept_place.is_allowed() else " (AUTOFIT_SERVER, CI or Slurm)"))
    return DONE if told or options.action == "stop" else NOTHING_FITS


def web(options: argparse.Namespace) -> int:
    from autofit.web.server import PageServer, examples
    from autofit.web.simulator import ALONE, PUBLIC, Simulator

    terminate_like_interrupt()
    _check(options)
    limits = PUBLIC if options.public else ALONE
    try:
        server = PageServer((options.host, options.port), access=_access(options), limits=limits)
    except OSError as error:
        raise ConfigError(
            f"--host {options.host} --port {options.port} cannot be served: {error.strerror}; choose another --port"
        ) from error
    try:
        with server, Simulator(limits) as simulator:
            server.answers = simulator
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            address = f"http://{_shown(options.host)}:{server.server_port}/"
            print(address, flush=True)
            if options.open:
                webbrowser.open(address)
            if not simulator.is_ready():
                raise EnvironmentFault(f"the simulation does not start{simulator.last_words}")
            say("ready; Ctrl-C stops it")
            if options.public:
                server.prepare(one.question for one in examples())
            threading.Event().wait()
    except KeyboardInterrupt:
        return DONE
    raise AssertionError("the event is never set")


def _check(options: argparse.Namespace) -> None:
    if not 0 <= options.port < 65536:
        raise ConfigError(f"--port must be between 0 (a free one) and 65535; got {options.port}")
    try:
        address = ipaddress.ip_address("127.0.0.1" if options.host == "localhost" else options.host)
    except ValueError as error:
        raise ConfigError(
            f"--host must be an address such as 127.0.0.1 or 0.0.0.0; got {quoted(options.host)}"
        ) from error
    if not address.is_loopback and not options.public:
        raise ConfigError(
            f"--host {options.host} can be reached from other machines; give --public too, which limits what each "
            "address may ask, or leave --host out"
        )


def _access(options: argparse.Namespace) -> "Access":
    from autofit.web.server import Access

    if options.public:
        return Access(hosts=frozenset(), framed_by="*", behind_proxy=options.behind_proxy)
    return Access(hosts=frozenset({"localhost", "127.0.0.1", "[::1]", _shown(options.host)}))


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
