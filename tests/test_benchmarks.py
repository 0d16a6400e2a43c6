"""The parts of the benchmarks that a wrong figure could come from; no Ray, no server."""

import dataclasses
import json
import socket

import numpy as np
import pytest

from benchmarks.example import PACKED, PADDED, Layout, arithmetic
from benchmarks.in_process import batches
from benchmarks.load import tokens_within
from benchmarks.memory import growth, title_of
from benchmarks.open_loop import Bodies, classify, due_times, seconds_of
from benchmarks.overload_report import BYSTANDER, LOAD, Level, expectations
from benchmarks.planning import Case, cases, measure, verdicts
from benchmarks.replies import breaches, counts, goodput, outcome_table, punctuality, recovered_s
from benchmarks.report import CELLS, report
from benchmarks.server import free_port, project_config
from benchmarks.streams import HANG, OK, OpenLoopResult, Reply, Stream, StreamResult
from benchmarks.table import Spread, Window, percentile, render
from benchmarks.testbed import Totals
from benchmarks.workload import LengthMix, Workload, make_texts, one_token_words


def _window(**fields: object) -> Window:
    defaults = {"tokens_per_s": 100.0, "num_answers": 1, "lowest_cosine": 1.0}
    return Window(**(defaults | fields))  # type: ignore[arg-type]  # fields of the caller


def test_length_mix() -> None:
    """The mean is the stated one less what the cap takes, nothing is above the cap, and the middle lies lower."""
    lengths = LengthMix().draw(50_000, seed=1)
    assert lengths.mean() == pytest.approx(38.5, abs=0.5)
    assert (lengths.min(), lengths.max()) == (3, 256)
    assert np.median(lengths) == pytest.approx(39 * np.exp(-(0.9**2) / 2), abs=1)


def test_length_mix_follows_its_seed() -> None:
    """One seed, one mix."""
    assert (LengthMix().draw(100, seed=1) == LengthMix().draw(100, seed=1)).all()
    assert (LengthMix().draw(100, seed=1) != LengthMix().draw(100, seed=2)).any()


def test_words_are_whole_entries() -> None:
    """Pieces, special tokens, signs, digits, other scripts and very short words are left out."""
    vocabulary = dict.fromkeys(["tree", "apple", "##ing", "[CLS]", "don't", "42nd", "naïve", "ab", "Big"], 0)
    assert one_token_words(vocabulary) == ["apple", "tree"]


def test_texts_have_the_words_that_lengths_leave() -> None:
    """Two tokens of each length are the special ones."""
    texts = make_texts([3, 10, 256], ["apple", "tree"], seed=0)
    assert [len(text.split()) for text in texts] == [1, 8, 254]


def test_cosines_find_wrong_answers() -> None:
    """Scale does not matter, direction does, and what is not a number never passes."""
    workload = Workload(texts=["a", "b", "c"], lengths=[3, 3, 3], reference=np.eye(3, dtype=np.float32))
    values = np.array([[0, 0, 2], [0, 1, 0], [np.nan, 0, 0]], dtype=np.float32)
    cosines = workload.cosines([2, 0, 1], values)
    assert cosines[:2].tolist() == [1, 0]
    assert not cosines[2] >= 0


@pytest.mark.parametrize(
    ("spans", "tokens"),
    [
        pytest.param([(10.0, 12.0, 30)], 30, id="inside"),
        pytest.param([(8.0, 12.0, 30)], 15, id="began before"),
        pytest.param([(19.0, 22.0, 30)], 10, id="ends after"),
        pytest.param([(5.0, 25.0, 30)], 15, id="around"),
        pytest.param([(5.0, 10.0, 30), (20.0, 21.0, 30)], 0, id="touches"),
    ],
)
def test_tokens_within_a_window(spans: list[tuple[float, float, int]], tokens: float) -> None:
    """A request counts for the share of its time that lies in the window from 10 to 20."""
    assert tokens_within(spans, 10.0, 20.0) == pytest.approx(tokens)


def test_batches_are_filled_to_the_limits() -> None:
    """Order is kept, a batch closes before it would pass the budget or the rows, the last one may be small."""
    rows = [(index, np.zeros(length, dtype=np.int32)) for index, length in enumerate([4, 6, 1, 1, 1, 1, 10, 3])]
    filled = [[index for index, _ in batch] for batch in batches(rows, token_budget=10, max_rows=3)]
    assert filled == [[0, 1], [2, 3, 4], [5], [6], [7]]


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (50, 2), (51, 3), (75, 3), (99, 4), (100, 4)])
def test_percentile_is_a_value_of_the_sample(percent: float, value: float) -> None:
    """Nearest rank, in whatever order the values come."""
    assert percentile([3, 1, 4, 2], percent) == value


def test_percentile_of_nothing() -> None:
    """There is no such number."""
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_spread() -> None:
    """Least, middle and most."""
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(1.0, 3.0, 10.0)


def test_table() -> None:
    """The first column is text, the others are numbers, and columns line up."""
    assert render(["name", "x"], [["a", "1"], ["longer", "1,000"]]).splitlines() == [
        "| name   |     x |",
        "| ------ | ----: |",
        "| a      |     1 |",
        "| longer | 1,000 |",
    ]


def test_report_divides_medians_of_like_cells() -> None:
    """b/a by both ways in process, b/c by the same load shape."""
    windows = {
        "process-ids": [_window(tokens_per_s=1000.0)],
        "process-texts": [_window(tokens_per_s=800.0)],
        "server-32x4": [_window(tokens_per_s=figure, latencies_s=[0.5]) for figure in (100.0, 600.0, 700.0)],
        "plain-32x4": [_window(tokens_per_s=200.0, latencies_s=[2.0])],
        "plain-1x64": [_window(tokens_per_s=1.0, latencies_s=[2.0])],
    }
    text, is_good = report(windows)
    row = next(line for line in text.splitlines() if CELLS["server-32x4"] in line)
    assert [cell.strip() for cell in row.split("|")[2:9]] == ["100", "600", "700", "0.60", "0.75", "3.00", "500"]
    assert is_good


@pytest.mark.parametrize(
    "window",
    [
        pytest.param(_window(errors=["status 503"]), id="error"),
        pytest.param(_window(num_wrong=1, lowest_cosine=float("nan")), id="wrong"),
        pytest.param(_window(num_answers=0), id="nothing compared"),
    ],
)
def test_report_refuses(window: Window) -> None:
    """One failed request, one wrong answer or none at all, and the figures are no result."""
    text, is_good = report({"process-ids": [_window(), window]})
    assert not is_good
    assert all(error in text for error in window.errors)


def test_report_doubts_a_busy_machine() -> None:
    """The figures stand, but the table says that others took part."""
    quiet, _ = report({"process-ids": [_window(foreign_cpu_share=0.01)]})
    busy, is_good = report({"process-ids": [_window(foreign_cpu_share=0.01), _window(foreign_cpu_share=0.3)]})
    assert "NOISY" not in quiet
    assert "NOISY: in 1 of 2 windows" in busy
    assert is_good


def test_free_port() -> None:
    """A port that can be listened on is given, one that somebody shares out already is not."""
    port = free_port()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        with pytest.raises(OSError, match="no free port"):
            free_port(range(port, port + 1))


def test_config_is_the_users_file() -> None:
    """Only what was asked for differs, in the revision alone."""
    changed, file = project_config(buckets=[{"max_tokens": 256}]), project_config()
    assert changed != file
    revision = next(app for app in changed["applications"] if "revision" in app["args"])
    assert revision["args"].pop("buckets") == [{"max_tokens": 256}]
    revision["args"]["buckets"] = next(app for app in file["applications"] if "revision" in app["args"])["args"][
        "buckets"
    ]
    assert changed == file


@pytest.mark.parametrize(
    ("layout", "forwards", "computed_tokens", "charged_tokens"),
    [
        pytest.param(PACKED, 1, 160, 160, id="packed"),
        pytest.param(PADDED[0], 3, 160, 336, id="padded in three"),
        pytest.param(PADDED[1], 1, 300, 768, id="padded in one"),
    ],
)
def test_example(layout: Layout, forwards: int, computed_tokens: int, charged_tokens: int) -> None:
    """Rows of 10, 50 and 100 tokens in each layout."""
    assert layout.expected([10, 50, 100]) == {
        "forwards": forwards,
        "rows": 3,
        "tokens": 160,
        "computed_tokens": computed_tokens,
        "charged_tokens": charged_tokens,
    }


def test_example_in_words() -> None:
    """The figures that the example is known by."""
    text = arithmetic([10, 50, 100])
    assert "padded 300, packed 160, ratio 1.875, waste 46.7%" in text
    assert "attention pairs 30000/12600, ratio 2.38" in text


def _stream(**fields: object) -> Stream:
    defaults = {"name": "t", "requests_per_s": 4.0, "lasts_s": 2.0, "connections": 1}
    return Stream(**(defaults | fields))  # type: ignore[arg-type]  # fields of the caller


def _reply(outcome: str = OK, **fields: object) -> Reply:
    defaults = {
        "due_s": 1.0,
        "sent_s": 1.0,
        "ended_s": 1.1,
        "num_texts": 1,
        "num_tokens": 10,
        "timeout_s": 0.5,
        "had_to_wait": False,
    }
    return Reply(outcome=outcome, **(defaults | fields))  # type: ignore[arg-type]  # fields of the caller


def test_regular_schedule() -> None:
    """Equal gaps from the start on, and nothing at or after the end."""
    assert due_times(_stream(is_regular=True, starts_s=10.0)) == [10.0 + number / 4 for number in range(8)]


def test_random_schedule() -> None:
    """The rate is the stated one, moments rise and stay inside, and a seed gives one schedule."""
    stream = _stream(requests_per_s=100.0, starts_s=3.0, lasts_s=50.0, seed=7)
    times = due_times(stream)
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert (times == sorted(times), times[0] >= 3.0, times[-1] < 53.0) == (True, True, True)
    assert times == due_times(stream)
    assert times != due_times(_stream(requests_per_s=100.0, starts_s=3.0, lasts_s=50.0, seed=8))


def _bodies(**fields: object) -> Bodies:
    workload = Workload(texts=list("abcde"), lengths=[3, 4, 5, 6, 7], reference=np.eye(5, dtype=np.float32))
    return Bodies(_stream(**fields), workload)


def test_bodies_take_turns() -> None:
    """Shapes in turn, timeouts each for all shapes, texts round and round."""
    bodies = _bodies(shapes=[1, 2], timeouts_ms=[500, 5000], fields={"revision": "m"})
    assert [json.loads(bodies.request(number).body) for number in range(4)] == [
        {"revision": "m", "timeout_ms": 500, "inputs": ["a"]},
        {"revision": "m", "timeout_ms": 500, "inputs": ["c", "d"]},
        {"revision": "m", "timeout_ms": 5000, "inputs": ["e"]},
        {"revision": "m", "timeout_ms": 5000, "inputs": ["b", "c"]},
    ]
    request = bodies.request(1)
    assert (request.texts, request.num_tokens, request.timeout_s, request.patience_s) == ([2, 3], 11, 0.5, 5.5)


def test_bodies_without_fields() -> None:
    """The baseline gets texts only, and as much time as the server gives by itself."""
    request = _bodies().request(4)
    assert (json.loads(request.body), request.timeout_s, request.patience_s) == ({"inputs": ["e"]}, None, 65.0)


@pytest.mark.parametrize(
    ("status", "answer", "outcome"),
    [
        pytest.param(200, b"whatever", OK, id="answer"),
        pytest.param(429, b'{"error": {"code": "tenant_over_share"}}', "429 tenant_over_share", id="our shape"),
        pytest.param(503, b"Service Unavailable", "503 without a code", id="plain text"),
        pytest.param(500, b'{"error": "x"}', "500 without a code", id="another shape"),
        pytest.param(500, b"[]", "500 without a code", id="no object"),
        pytest.param(504, b"", "504 without a code", id="empty"),
    ],
)
def test_outcomes_have_names(status: int, answer: bytes, outcome: str) -> None:
    """By status and code; what has no code is seen."""
    assert classify(status, answer) == outcome


@pytest.mark.parametrize(
    ("header", "seconds"), [(None, None), ("3", 3.0), ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("-1", None)]
)
def test_retry_after(header: str | None, seconds: float | None) -> None:
    """Whole seconds; anything else is none that a client could use."""
    assert seconds_of(header) == seconds


def test_two_clocks_of_a_reply() -> None:
    """The server is held to the time since it was asked, the caller sees the time since it was due."""
    reply = _reply(due_s=1.0, sent_s=3.0, ended_s=3.5)
    assert (reply.latency_s, reply.delay_s) == (0.5, 2.5)


def test_result_survives_json() -> None:
    """What the measuring process prints is what the other one reads."""
    result = OpenLoopResult(streams={"t": StreamResult(num_due=2, replies=[_reply()])}, client_cpu_share=0.1)
    assert OpenLoopResult.of_json(json.loads(json.dumps(dataclasses.asdict(result)))) == result


def test_goodput_is_what_came_in_time() -> None:
    """Late answers, refusals and what came after the window do not count; no deadline is never late."""
    replies = [
        _reply(ended_s=1.5, num_tokens=1),
        _reply(ended_s=1.6, num_tokens=10),
        _reply("429 tenant_over_share", num_tokens=100),
        _reply(ended_s=9.0, timeout_s=None, num_tokens=1000),
        _reply(ended_s=10.1, timeout_s=None, num_tokens=10_000),
    ]
    assert goodput(replies, seconds=10.0) == pytest.approx(100.1)


def test_outcome_table() -> None:
    """One line per outcome, with its own times."""
    replies = [_reply(ended_s=1.2), _reply(ended_s=1.3), _reply("503 overloaded", retry_after_s=2.0)]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in outcome_table(replies).splitlines()]
    assert lines[2:] == [
        ["200", "2", "2", "200", "300", "300", "", ""],
        ["503 overloaded", "1", "1", "100", "100", "100", "2", "2"],
    ]
    assert counts(replies) == "1 x 503 overloaded"


@pytest.mark.parametrize(
    ("reply", "is_breach"),
    [
        pytest.param(_reply(), False, id="answer"),
        pytest.param(_reply("429 quota_exceeded", retry_after_s=1.0), False, id="refusal"),
        pytest.param(_reply("504 deadline_exceeded"), False, id="late"),
        pytest.param(_reply("503 overloaded"), True, id="no Retry-After"),
        pytest.param(_reply("500 internal_error"), True, id="another status"),
        pytest.param(_reply("error ServerDisconnectedError"), True, id="no connection"),
        pytest.param(_reply(HANG), True, id="hang"),
    ],
)
def test_breaches(reply: Reply, is_breach: bool) -> None:
    """What a load may do to a request, and what it may not."""
    assert bool(breaches({"t": StreamResult(num_due=1, replies=[reply])})) is is_breach


def test_wrong_answers_are_breaches() -> None:
    """A fast wrong answer is none."""
    result = StreamResult(num_due=1, replies=[_reply()], num_checked=3, num_wrong=1)
    assert breaches({"t": result}) == ["t: 1 of 3 texts answered wrongly"]


def test_punctuality() -> None:
    """Lateness of the generator and waiting for a connection are told apart, and what was never sent is counted."""
    replies = [_reply(sent_s=1.002), _reply(sent_s=3.0, had_to_wait=True)]
    text = punctuality(StreamResult(num_due=5, replies=replies))
    assert "5 due, 2 sent, 3 never sent; 1 waited for a connection (p99 2,000 ms)" in text
    assert "sent 2 ms late" in text


def test_recovery() -> None:
    """The first probe after the load that was quick counts from when it was due; refused ones are not quick."""
    probes = [
        _reply(due_s=9.0, ended_s=9.01),
        _reply(due_s=10.0, ended_s=12.0),
        _reply("429 tenant_over_share", due_s=10.5, ended_s=10.51),
        _reply(due_s=11.0, ended_s=11.05),
        _reply(due_s=12.0, ended_s=12.01),
    ]
    assert recovered_s(probes, after_s=10.0, normal_s=0.1) == 1.0
    assert recovered_s(probes[:3], after_s=10.0, normal_s=0.1) is None


@pytest.mark.parametrize(
    ("command_line", "title"),
    [
        ("ray::ServeReplica:minilm-v1:tokens-256.handle_request\0\0", "minilm-v1:tokens-256"),
        ("ray::ServeReplica:gateway:Ingress\0\0\0", "gateway:Ingress"),
        ("ray::ProxyActor.run", "ProxyActor"),
        ("ray::ServeController.listen", None),
        ("grep ray::ServeReplica:gateway:Ingress", None),
    ],
)
def test_titles(command_line: str, title: str | None) -> None:
    """Replicas and proxies by their title, whatever they run at the moment."""
    assert title_of(command_line) == title


def test_growth_is_of_one_process() -> None:
    """A replica that was replaced has not grown."""
    assert growth({"a (1)": 10, "b (2)": 10}, {"a (1)": 15, "b (3)": 90}) == {"a (1)": 5}


def _level(factor: float, *, tokens: int, mib: int, normal_at: float) -> Level:
    probes = StreamResult(num_due=1, replies=[_reply(due_s=normal_at, ended_s=normal_at + 0.01)])
    streams = {f"probe of {tenant}": probes for tenant in (LOAD, BYSTANDER)}
    streams[LOAD] = StreamResult(num_due=1, replies=[_reply(num_tokens=tokens)])
    return Level(
        factor=factor,
        seconds=2.0,
        offered=100.0,
        result=OpenLoopResult(streams=streams, client_cpu_share=0.1),
        computed=Totals(forwards=1, rows=4, computed_tokens=tokens + 27, failed_rows=0, refused=0),
        memory_before={},
        memory_after={"gateway:Ingress (1)": mib * 2**20},
    )


@pytest.mark.parametrize(
    ("worst", "answers"),
    [
        pytest.param(_level(5, tokens=90, mib=126, normal_at=4.0), ["yes", "yes", "yes", "yes"], id="at the limits"),
        pytest.param(_level(5, tokens=89, mib=127, normal_at=4.1), ["no", "no", "no", "no"], id="beyond them"),
    ],
)
def test_expectations_of_overload(worst: Level, answers: list[str]) -> None:
    """90 % of the best goodput, a tenth and 16 MiB more memory, 2 s to be normal again."""
    levels = [_level(1, tokens=100, mib=100, normal_at=2.0), worst]
    lines = expectations(levels, idle_p50_s=0.01)
    assert [line.partition(": ")[2].split()[0].rstrip(";") for line in lines] == answers


def test_vain_work() -> None:
    """What the replica computed less what clients got: 4 texts and 127 tokens, of which 3 texts and 120 arrived."""
    level = _level(1, tokens=100, mib=100, normal_at=2.0)
    assert (level.texts_in_vain, level.tokens_in_vain) == (1, 7)


def test_cases_of_planning() -> None:
    """No case has more tenants than rows, and one tenant has one group either way."""
    found = cases([100, 1000])
    assert len(found) == len(set(found)) == 16
    assert all(case.tenants <= case.waiting for case in found)


def test_planning_measures_batches_of_a_queue_that_stays_full() -> None:
    """As many samples as batches and rows; the batch holds about what was asked for."""
    timings = measure(Case(waiting=100, tenants=10, own_groups=False, batch_rows=8), num_batches=5)
    assert (len(timings.batch_s), len(timings.refuse_s)) == (5, 5)
    assert len(timings.admit_s) == round(timings.rows_per_batch * 5)
    assert 4 <= timings.rows_per_batch <= 16


def test_planning_judges_the_worst_case() -> None:
    """At the stated size only; elsewhere nothing is promised."""
    quick = measure(Case(waiting=100, tenants=1, own_groups=False, batch_rows=52), num_batches=1)
    slow = dataclasses.replace(quick, batch_s=[0.5])
    at_size = Case(waiting=10_000, tenants=1000, own_groups=False, batch_rows=52)
    assert verdicts({dataclasses.replace(at_size, waiting=100_000): slow}) == []
    assert ": no (500,000 µs)" in verdicts({at_size: slow})[0]
