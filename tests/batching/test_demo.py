"""The demo as a command; what it must print is in `contracts/seed0/test_demo.py`."""

import runpy
import sys

import pytest

from batching import demo


@pytest.mark.parametrize("num_requests", ["1", "5"])
def test_exit_status_is_zero_when_all_is_right(
    num_requests: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends in 0 after its whole cohort came back right."""
    monkeypatch.setattr(sys, "argv", ["demo", "--requests", num_requests])
    monkeypatch.delitem(sys.modules, "batching.demo")
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("batching.demo", run_name="__main__")
    assert not caught.value.code
    assert f"completed {num_requests} of {num_requests} in" in capsys.readouterr().out


def test_exit_status_is_one_when_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that answers otherwise is noticed."""
    monkeypatch.setattr(sys, "argv", ["demo", "--requests", "3"])
    monkeypatch.setattr(demo.DoublingModel, "__call__", lambda self, batch: batch.attention_mask)
    with pytest.raises(SystemExit) as caught:
        demo.main()
    assert caught.value.code == 1


def test_cohort_is_the_same_every_time() -> None:
    """One seed is one cohort."""
    assert demo.cohort(20) == demo.cohort(20)
    assert {request.tenant for request in demo.cohort(20)} == {"tenant-a", "tenant-b"}
