"""What the ingress knows of revisions as their applications come, change, fail and go."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError
from ray.serve.exceptions import RayServeException

from batching.errors import ForwardFailed, RevisionUnavailable
from deployments.revisions import (
    CALL_TIMEOUT_S,
    REFRESH_DOWN_S,
    REFRESH_UP_S,
    ApplicationMissing,
    RevisionDirectory,
    _reason,
)
from deployments.tokenization import EncodedInput
from tests.deployments.fakes import (
    FakeConnect,
    Rounds,
    as_ray_raises,
    current_loop,
    in_skewed_loop,
    revision_info,
)

V1, APP = "minilm@v1", "minilm-v1"


class Directory:
    """A directory whose refresh rounds are stepped by hand."""

    def __init__(self, **applications: Any) -> None:
        self.connect = FakeConnect({name.replace("_", "-"): answer for name, answer in applications.items()})
        self.rounds = Rounds()
        self.directory = RevisionDirectory(self.connect, sleep=self.rounds)

    async def configure(self, applications: dict[str, str]) -> None:
        """Configure and let every new revision be asked once."""
        new = [revision for revision in applications if revision not in self.directory.names()]
        before = len(self.rounds.naps)
        self.directory.configure(applications)
        await self.rounds.ended(before + len(new))

    def is_up(self, revision: str = V1) -> bool:
        """Whether there is a snapshot."""
        try:
            self.directory.get(revision)
        except RevisionUnavailable:
            return False
        return True


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(ApplicationMissing(APP), "application minilm-v1 is not deployed", id="not deployed"),
        pytest.param(ActorDiedError(), "application minilm-v1 does not answer (ActorDiedError)", id="replica died"),
        pytest.param(RayServeException("x"), "application minilm-v1 does not answer (RayServeException)", id="serve"),
        pytest.param(GetTimeoutError("x"), "application minilm-v1 does not answer (GetTimeoutError)", id="time-out"),
        pytest.param(
            as_ray_raises(ForwardFailed("x")),
            "application minilm-v1 does not answer (RayTaskError(ForwardFailed))",
            id="our error from a replica",
        ),
    ],
)
@in_skewed_loop
async def test_revision_that_never_answered_is_unavailable(error: Exception, reason: str) -> None:
    """Whatever asking ends in, the revision is down for a reason, and is asked again soon."""
    setup = Directory(minilm_v1=error)
    await setup.configure({V1: APP})
    with pytest.raises(RevisionUnavailable) as caught:
        setup.directory.get(V1)
    assert (caught.value.revision, caught.value.retry_after_s) == (V1, 1.0)
    assert setup.directory.reason(V1) == reason
    assert setup.rounds.naps == [REFRESH_DOWN_S]
    await setup.directory.stop()


@in_skewed_loop
async def test_application_that_does_not_answer_in_time() -> None:
    """A description that never comes is given up after CALL_TIMEOUT_S."""

    class Silent(FakeConnect):
        async def describe(self, application: str, known_fingerprint: str | None) -> Any:
            """Never answer."""
            await current_loop().create_future()

    rounds = Rounds()
    directory = RevisionDirectory(Silent(), sleep=rounds)
    directory.configure({V1: APP})
    await current_loop().skip(0)
    await current_loop().skip(CALL_TIMEOUT_S - 0.5)
    assert rounds.naps == []
    assert directory.reason(V1) == "its application has not answered yet"
    await current_loop().skip(0.6)
    await rounds.ended(1)
    assert directory.reason(V1) == "application minilm-v1 does not answer (TimeoutError)"
    await directory.stop()


@in_skewed_loop
async def test_wrong_revision_is_never_served() -> None:
    """An application that serves another revision than configured is down, and the reason names both."""
    setup = Directory(minilm_v1=revision_info("minilm@v2"))
    await setup.configure({V1: APP})
    assert not setup.is_up()
    assert setup.directory.reason(V1) == "application minilm-v1 serves another revision, minilm@v2"
    await setup.directory.stop()


@in_skewed_loop
async def test_wrong_revision_replaces_a_right_one() -> None:
    """When an application comes to serve another revision, the old snapshot is not used any more."""
    setup = Directory(minilm_v1=revision_info())
    await setup.configure({V1: APP})
    setup.connect.applications[APP] = revision_info("minilm@v2")
    await setup.rounds.next()
    assert not setup.is_up()
    await setup.directory.stop()


@in_skewed_loop
async def test_revision_comes_up() -> None:
    """Down, then described once: a snapshot with encoder, buckets and one handle per bucket."""
    setup = Directory()
    await setup.configure({V1: APP})
    assert not setup.is_up()
    setup.connect.applications[APP] = revision_info()
    await setup.rounds.next()
    live = setup.directory.get(V1)
    (encoded,) = live.encoder.encode(["the"], ["input"], truncate=False)
    assert isinstance(encoded, EncodedInput)
    assert np.array_equal(encoded.token_ids, [101, 1996, 102])
    assert (live.info, live.buckets.ceilings) == (revision_info(), (16, 64))
    assert live.handles == tuple(setup.connect.fake_bucket(APP, name) for name in ("tokens-16", "tokens-64"))
    assert setup.rounds.naps == [REFRESH_DOWN_S, REFRESH_UP_S]
    await setup.directory.stop()


@in_skewed_loop
async def test_unchanged_fingerprint_keeps_the_snapshot() -> None:
    """An application that says nothing new costs no new tokenizer and no new handles."""
    setup = Directory(minilm_v1=revision_info())
    await setup.configure({V1: APP})
    live = setup.directory.get(V1)
    await setup.rounds.next()
    assert setup.directory.get(V1) is live
    assert setup.connect.asked == [(APP, None), (APP, live.fingerprint)]
    await setup.directory.stop()


@in_skewed_loop
async def test_changed_fingerprint_replaces_the_snapshot() -> None:
    """A redeployed application with other buckets is noticed; who holds the old snapshot keeps it whole."""
    setup = Directory(minilm_v1=revision_info())
    await setup.configure({V1: APP})
    old = setup.directory.get(V1)
    setup.connect.applications[APP] = revision_info(ceilings=(32,))
    await setup.rounds.next()
    assert setup.directory.get(V1).buckets.ceilings == (32,)
    assert old.buckets.ceilings == (16, 64)
    await setup.directory.stop()


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        pytest.param(ActorDiedError(), True, id="replica died: stays, others may answer"),
        pytest.param(GetTimeoutError("x"), True, id="slow: stays"),
        pytest.param(ApplicationMissing(APP), False, id="application deleted: goes"),
    ],
)
@in_skewed_loop
async def test_what_makes_a_known_revision_go(error: Exception, *, stays: bool) -> None:
    """Only an application that no longer exists is forgotten; then it is asked often, in case it returns."""
    setup = Directory(minilm_v1=revision_info())
    await setup.configure({V1: APP})
    setup.connect.applications[APP] = error
    await setup.rounds.next()
    assert setup.is_up() is stays
    assert setup.rounds.naps[-1] == (REFRESH_UP_S if stays else REFRESH_DOWN_S)
    setup.connect.applications[APP] = revision_info()
    await setup.rounds.next()
    assert setup.is_up()
    assert setup.directory.reason(V1) == "its application has not answered yet"
    await setup.directory.stop()


@in_skewed_loop
async def test_same_trouble_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A revision that stays down does not fill the log."""
    setup = Directory()
    with caplog.at_level(logging.WARNING, logger="deployments.revisions"):
        await setup.configure({V1: APP})
        await setup.rounds.next()
        await setup.rounds.next()
    assert [record.getMessage() for record in caplog.records] == [
        "revision minilm@v1: application minilm-v1 is not deployed"
    ]
    await setup.directory.stop()


@in_skewed_loop
async def test_one_revision_down_leaves_the_others_up() -> None:
    """Each revision is asked on its own."""
    setup = Directory(minilm_v1=revision_info(), broken=ActorDiedError())
    await setup.configure({V1: APP, "broken@v1": "broken", "gone@v1": "gone"})
    assert [setup.is_up(revision) for revision in setup.directory.names()] == [True, False, False]
    await setup.directory.stop()


@in_skewed_loop
async def test_configure_adds_removes_and_keeps() -> None:
    """A new mapping asks the new, forgets the removed, and leaves the rest alone."""
    setup = Directory(
        minilm_v1=revision_info(), other=revision_info("other@v1"), third=revision_info("third@v1", ceilings=(8,))
    )
    await setup.configure({V1: APP, "other@v1": "other"})
    kept = setup.directory.get(V1)
    await setup.configure({V1: APP, "third@v1": "third"})
    assert setup.directory.names() == (V1, "third@v1")
    assert setup.directory.get(V1) is kept
    assert (setup.is_up("other@v1"), setup.is_up("third@v1")) == (False, True)
    asked = len(setup.connect.asked)
    await setup.rounds.next()
    assert {application for application, _ in setup.connect.asked[asked:]} == {APP, "third"}
    await setup.directory.stop()


@in_skewed_loop
async def test_configure_moves_a_revision_to_another_application() -> None:
    """The same revision from another application is asked anew, and calls go there."""
    setup = Directory(minilm_v1=revision_info(), minilm_new=revision_info())
    await setup.configure({V1: APP})
    setup.directory.configure({V1: "minilm-new"})
    assert not setup.is_up()
    await setup.rounds.ended(2)
    assert setup.directory.get(V1).handles[0] is setup.connect.fake_bucket("minilm-new", "tokens-16")
    await setup.directory.stop()


@in_skewed_loop
async def test_configure_twice_asks_once() -> None:
    """The same mapping again starts nothing."""
    setup = Directory(minilm_v1=revision_info())
    await setup.configure({V1: APP})
    setup.directory.configure({V1: APP})
    await current_loop().skip(0)
    assert setup.connect.asked == [(APP, None)]
    await setup.directory.stop()


@in_skewed_loop
async def test_stop_ends_every_task() -> None:
    """After stop nobody asks any more."""
    setup = Directory(minilm_v1=revision_info(), other=ActorDiedError())
    await setup.configure({V1: APP, "other@v1": "other"})
    await setup.directory.stop()
    assert all(sleeper.cancelled() for sleeper in setup.rounds.sleepers)


@in_skewed_loop
async def test_an_unforeseen_error_does_not_end_the_refresh() -> None:
    """A description that cannot be used is reported, and asked for again until it can."""
    connect = FakeConnect({"minilm-v1": revision_info(tokenizer_json="not a tokenizer")})
    rounds = Rounds()
    directory = RevisionDirectory(connect, sleep=rounds)
    directory.configure({"minilm@v1": "minilm-v1"})
    await rounds.ended(1)
    assert "cannot be used" in directory.reason("minilm@v1")
    connect.applications["minilm-v1"] = revision_info()
    await rounds.next()
    assert directory.get("minilm@v1").info.revision == "minilm@v1"
    await directory.stop()


TRACEBACK = """The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:bad:tokens-64.initialize_and_get_metadata() (pid=1)
  File "model.py", line 7, in load_model
deployments.model.ModelLoadError: the model folder /nowhere/model does not exist
"""


@pytest.mark.parametrize(
    ("application", "deployment", "expected"),
    [
        pytest.param(
            "Failed to update the deployments ['tokens-64'].",
            TRACEBACK,
            "deployments.model.ModelLoadError: the model folder /nowhere/model does not exist",
            id="an error in a replica",
        ),
        pytest.param("Could not import it.\n", "", "Could not import it.", id="no error named"),
        pytest.param("", "", "no message", id="no message"),
    ],
)
def test_reason_of_a_failed_deployment_is_one_line(application: str, deployment: str, expected: str) -> None:
    """Of Serve's messages, remote tracebacks included, the error itself is what an operator gets to read."""
    overview = SimpleNamespace(message=application, deployments={"tokens-64": SimpleNamespace(message=deployment)})
    assert _reason(overview) == expected
