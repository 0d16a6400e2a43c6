"""What was refused a moment ago is refused without work; what is easier, later or another's is not."""

import pytest

from batching.errors import (
    DeadlineUnreachable,
    ForwardFailed,
    Overloaded,
    QueueFull,
    TenantOverShare,
    TokenServeError,
    WaitTooLong,
)
from deployments.shedding import MIN_REFUSALS, MOST_REMEMBERED_S, Shedder, Size

KEY = ("acme", "minilm@v1", "interactive")
REFUSED = Size(num_chars=100, timeout_s=1.0)


def _check(shedder: Shedder, size: Size = REFUSED, *, now: float = 10.1, key: tuple[str, str, str] = KEY) -> object:
    try:
        shedder.check(key, size, now)
    except TokenServeError as error:
        return error
    return None


def _after(error: TokenServeError) -> Shedder:
    shedder = Shedder()
    for _ in range(MIN_REFUSALS):
        shedder.note(KEY, REFUSED, error, 10.0)
    return shedder


@pytest.mark.parametrize(
    ("size", "is_refused"),
    [
        pytest.param(REFUSED, True, id="the same"),
        pytest.param(Size(num_chars=101, timeout_s=0.9), True, id="larger and less patient"),
        pytest.param(Size(num_chars=99, timeout_s=1.0), False, id="smaller"),
        pytest.param(Size(num_chars=100, timeout_s=1.1), False, id="more patient"),
    ],
)
def test_only_what_is_no_easier_is_shed(size: Size, *, is_refused: bool) -> None:
    """A replica is asked about everything that it might take."""
    assert (_check(_after(TenantOverShare(3.0)), size) is not None) is is_refused


@pytest.mark.parametrize(
    "key",
    [
        ("globex", "minilm@v1", "interactive"),
        ("acme", "minilm@v2", "interactive"),
        ("acme", "minilm@v1", "batch"),
    ],
)
def test_others_are_not_touched(key: tuple[str, str, str]) -> None:
    """Another tenant, revision or priority has another backlog before it."""
    assert _check(_after(Overloaded(3.0)), key=key) is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(TenantOverShare(3.0), TenantOverShare(2.9), id="own share"),
        pytest.param(Overloaded(3.0), Overloaded(2.9), id="backlog"),
        pytest.param(QueueFull(8, 3.0), Overloaded(2.9), id="a group's backlog"),
        pytest.param(WaitTooLong(0.9, 5.0, 3.0), WaitTooLong(1.0, 5.0, 2.9), id="deadline"),
    ],
)
def test_the_answer_is_that_of_the_replica_less_the_time_since(
    error: TokenServeError, expected: TokenServeError
) -> None:
    """Same cause, and Retry-After still names the same moment."""
    again = _check(_after(error))
    assert type(again) is type(expected)
    assert isinstance(again, TokenServeError)
    assert again.args == pytest.approx(expected.args)


def test_it_is_forgotten_within_half_a_second() -> None:
    """The backlog may be gone: the replica is asked again."""
    shedder = _after(TenantOverShare(30.0))
    assert _check(shedder, now=10.0 + MOST_REMEMBERED_S - 0.01) is not None
    assert _check(shedder, now=10.0 + MOST_REMEMBERED_S) is None
    assert _check(_after(TenantOverShare(0.05))) is None


@pytest.mark.parametrize("error", [ForwardFailed("ValueError"), DeadlineUnreachable(1.0, 2.0)])
def test_errors_of_one_request_say_nothing_of_the_next(error: TokenServeError) -> None:
    """Only refusals for load are remembered."""
    assert _check(_after(error)) is None


def test_one_full_replica_is_not_all_of_them() -> None:
    """A single refusal sheds nothing, and a request that a replica took ends the row of refusals."""
    shedder = Shedder()
    for _ in range(MIN_REFUSALS - 1):
        shedder.note(KEY, REFUSED, Overloaded(3.0), 10.0)
    assert _check(shedder) is None
    shedder.answered(KEY)
    shedder.note(KEY, REFUSED, Overloaded(3.0), 10.0)
    assert _check(shedder) is None


def test_memory_is_bounded() -> None:
    """Tenants that were refused once do not stay."""
    shedder = Shedder()
    for index in range(5000):
        shedder.note((f"t{index}", "minilm@v1", "batch"), REFUSED, Overloaded(5.0), float(index))
    assert len(shedder._refused) < 1100


def test_what_is_shed_is_counted_by_cause() -> None:
    """Once for each request that was refused here, none for those that a replica is asked about."""
    counted: list[dict[str, str] | None] = []

    class Counter:
        def inc(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
            """Note it."""
            counted.append(tags)

    shedder = Shedder(Counter())
    for _ in range(MIN_REFUSALS):
        _check(shedder)
        shedder.note(KEY, REFUSED, TenantOverShare(3.0), 10.0)
    assert counted == []
    _check(shedder)
    _check(shedder, now=20.0)
    assert counted == [{"error": "TenantOverShare"}]
