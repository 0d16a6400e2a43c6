"""The parts of the benchmarks that a wrong figure could come from; no Ray, no server."""

import socket

import numpy as np
import pytest

from benchmarks.example import PACKED, PADDED, Layout, arithmetic
from benchmarks.in_process import batches
from benchmarks.load import tokens_within
from benchmarks.report import CELLS, report
from benchmarks.server import free_port, project_config
from benchmarks.table import Spread, Window, percentile, render
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
