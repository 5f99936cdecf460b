"""The server of `autofit web`: what it refuses, and how answers wait for each other."""

import html
import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from web_served import MODEL, asked, kept, question, served

from autofit.errors import ConfigError
from autofit.recipe.yaml_file import parse_yaml
from autofit.web.server import FILES, Access, ArrivalQueue, Connections, Full, examples
from autofit.web.simulator import ALONE, Question, Rate


def test_the_page_loads_nothing_from_elsewhere_and_lets_nothing_in() -> None:
    with served() as (server, _):
        for path in FILES:
            status, headers, body = asked(server, path, method="GET")
            assert status == 200
            assert "http://" not in body.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in body
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
            assert policy.endswith("frame-ancestors 'self'")
            assert headers["X-Content-Type-Options"] == "nosniff"
        page = asked(server, "/", method="GET")[2]
        assert "<script src=" in page
        assert " style=" not in page
        assert " onclick=" not in page
        assert 'value="h100"' in page
        assert f'value="{MODEL}"' in page
        assert asked(server, "/", method="HEAD")[2] == ""


@pytest.mark.parametrize("path", ["/../pyproject.toml", "/page/index.html", "//etc/passwd", "/%2e%2e/etc/passwd", "/."])
def test_no_path_leads_to_another_file(path: str) -> None:
    with served() as (server, _):
        assert asked(server, path, method="GET")[0] == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"Host": "evil.example:7860"}, 403), ({"Host": "127.0.0.1.evil.example"}, 403),
     ({"Host": "localhost", "Origin": "https://evil.example"}, 403), ({"Host": "localhost", "Origin": "null"}, 403),
     ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200)],
)  # fmt: skip
def test_a_page_of_another_site_reaches_nothing(headers: dict[str, str], status: int) -> None:
    with served() as (server, told):
        assert asked(server, body=question(), **headers)[0] == status
        assert bool(told.ended) is (status == 200)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [("{", {}, 400), ("[]", {}, 400), ('{"text": 1}', {}, 400), ("[" * 100_000, {}, 400), ("\xff", {}, 400),
     (question(kind="run"), {}, 400), (question(shell="ls"), {}, 400), (question(count=True), {}, 400),
     (question(count=3), {}, 400), (question(tokens=0), {}, 400), (question(tokens=10**9), {}, 400),
     (question(changes=[1]), {}, 400), (question("x" * 70_000), {}, 400), (question(sharing="/etc/passwd"), {}, 400),
     ("x" * 300_000, {}, 413), (question(), {"Content-Length": "99999999999"}, 413),
     (question(), {"Content-Length": "-1"}, 411), (question(), {"Content-Type": "text/plain"}, 415)],
)  # fmt: skip
def test_a_question_that_is_none_is_refused_in_one_sentence(body: str, headers: dict[str, str], status: int) -> None:
    with served() as (server, told):
        found, _, said = asked(server, body=body.encode("latin-1"), **headers)
        assert found == status
        assert set(json.loads(said)) == {"is", "text"}
        assert not told.ended


def test_a_paste_that_is_too_long_is_told_by_the_pages_words_and_its_length() -> None:
    with pytest.raises(ConfigError, match="the recipe must have at most 65,536 characters here; it has 70,000"):
        Question.from_json({"text": "x" * 70_000})
    with pytest.raises(ConfigError, match=r"config\.json must have at most"):
        Question.from_json({"text": "x", "config": "x" * 70_000})


def test_the_error_that_the_page_names_is_that_of_the_table() -> None:
    table = (Path(__file__).parents[1] / "experiments" / "accuracy" / "table.md").read_text()
    rows = [
        line.split("|") for line in table.splitlines() if "| reserved_max_bytes | " in line and line.count("|") == 7
    ]
    worst = min(float(row[6].strip(" %")) for row in rows)
    count = sum(int(row[3]) for row in rows)
    with served() as (server, _):
        page = asked(server, "/", method="GET")[2]
    assert f"the worst of {count} peaks that others measured was predicted {-worst:.1f} % too low" in page


def test_an_answer_comes_line_by_line() -> None:
    with served() as (server, _):
        status, headers, body = asked(server, body=question("<b>"))
        assert status == 200
        assert headers["Content-Type"].startswith("application/x-ndjson")
        assert [json.loads(line)["is"] for line in body.splitlines()] == ["started", "note", "done"]


def test_one_answer_is_made_at_a_time_and_the_line_has_an_end() -> None:
    with served(replace(ALONE, waiting=2, of_address=9)) as (server, told):
        found: list[tuple[int, Mapping[str, str], str]] = []
        threads = [
            threading.Thread(target=lambda: found.append(asked(server, body=question("slow")))) for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 20
        while len(found) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert [status for status, _, _ in found] == [503, 503]
        told.may_end.set()
        for thread in threads:
            thread.join(20)
        assert sorted(status for status, _, _ in found) == [200, 200, 200, 503, 503]
        assert told.most == 1
        assert any('"place": 1' in body for _, _, body in found)


def test_one_address_has_few_places_and_asks_no_faster_than_it_may() -> None:
    line = ArrivalQueue(at_once=1, waiting=9, of_address=1)

    def turn() -> AbstractContextManager[None]:
        return line.turn("a", waits=lambda _: None)

    with turn(), pytest.raises(Full, match="at most 1 questions of one address"), turn():
        pass
    with turn():
        pass
    now = [0.0]
    rate = Rate(2, clock=lambda: now[0])
    assert [rate.wait_s("a"), rate.wait_s("a"), rate.wait_s("b")] == [0, 0, 0]
    assert rate.wait_s("a") == pytest.approx(30)
    now[0] = 31.0
    assert rate.wait_s("a") == 0
    with served(replace(ALONE, a_minute=1)) as (server, _):
        assert [asked(server, body=question())[0] for _ in range(2)] == [200, 429]


def test_behind_a_proxy_the_address_is_the_last_that_it_names() -> None:
    with served(replace(ALONE, a_minute=1), Access(hosts=frozenset(), behind_proxy=True)) as (server, _):

        def status(told: str) -> int:
            return asked(server, body=question(), X_Forwarded_For=told)[0]

        assert [status("9.9.9.9, 1.1.1.1"), status("1.1.1.1, 2.2.2.2"), status("8.8.8.8, 1.1.1.1")] == [200, 200, 429]


def test_an_answer_ends_when_nobody_listens_any_more() -> None:
    with served() as (server, told), socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        body = question("slow").encode()
        head = (
            f"POST /answer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        with connection.makefile("rb") as lines:
            while b"note" not in lines.readline():
                pass
        connection.close()
        end = time.monotonic() + 20
        while not told.ended and time.monotonic() < end:
            time.sleep(0.01)
        assert told.ended == ["slow"]


def test_a_request_that_dribbles_in_is_dropped_and_others_are_answered() -> None:
    with served(replace(ALONE, request_s=0.3, connections=3)) as (server, told):
        slow = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(3)]
        began = time.monotonic()
        while time.monotonic() - began < 5:
            try:
                for connection in slow:
                    connection.sendall(b"G")
            except OSError:
                break
            time.sleep(0.05)
        assert time.monotonic() - began < 4
        assert asked(server, "/health", method="GET")[0] == 200
        assert not told.ended
        for connection in slow:
            connection.close()


def test_requests_that_dribble_in_give_way_to_others_and_to_no_answer_that_is_made() -> None:
    with served(replace(ALONE, request_s=60, connections=4)) as (server, told):
        found: list[tuple[int, Mapping[str, str], str]] = []
        at_work = threading.Thread(target=lambda: found.append(asked(server, body=question("slow"))))
        at_work.start()
        while not told.at_work:
            time.sleep(0.01)
        slow = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(12)]
        for connection in slow:
            with suppress(OSError):  # it has given way already
                connection.sendall(b"POST /answer HTTP/1.1\r\n")
        for _ in range(6):
            began = time.monotonic()
            assert asked(server, "/health", method="GET")[0] == 200
            assert time.monotonic() - began < 10
        told.may_end.set()
        at_work.join(timeout=20)
        assert found[0][0] == 200
        assert '"done"' in found[0][2]
        for connection in slow:
            connection.close()


def test_with_all_places_at_work_a_new_connection_is_closed() -> None:
    places = Connections(1)
    (ours, other), (late, far) = socket.socketpair(), socket.socketpair()
    assert places.take(ours, "1.2.3.4")
    assert places.has_asked(ours)
    assert not places.take(late, "1.2.3.4")
    places.release(ours)
    assert places.take(late, "1.2.3.4")
    assert places.take(ours, "5.6.7.8")  # it has the place of one whose request is still arriving
    assert not places.has_asked(late)
    for end in (ours, other, late, far):
        end.close()


def test_the_examples_of_the_page_are_questions_and_are_prepared_in_their_turn() -> None:
    with served() as (server, told):
        page = asked(server, "/", method="GET")[2]
        server.prepare(one.question for one in examples())
        assert told.ended == [one.question.text for one in examples()]
        assert told.most == 1
        for one in examples():
            assert html.escape(one.question.text) in page
            assert kept(one.question.text) == parse_yaml(one.question.text)
