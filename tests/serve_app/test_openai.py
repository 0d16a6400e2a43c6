"""POST /v1/embeddings and GET /v1/models, as OpenAI's clients send and read them."""

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.deployments.fakes import DIMENSION, VOCAB_SIZE, revision_info, vector
from tests.serve_app.fakes import ACME, ADMIN, GLOBEX, SETTINGS, Server, error_of, openai

THE = [101, 1996, 102]
CL100K_HELLO_WORLD = [9906, 1917]


def embeddings(response: httpx.Response) -> NDArray[np.float32]:
    """The vectors of a good answer as floats, checked to be in order."""
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    return np.array([each["embedding"] for each in data], dtype=np.float32)


# ---- wrong fields ----------------------------------------------------------------------------------------------------

FORMATS = "should be 'float' or 'base64'"
WRONG_FIELDS = [
    pytest.param({"inputs": []}, "inputs", "is not a known field", id="unknown field"),
    pytest.param({"input": None}, "input", "must be a string, a list of strings", id="input null"),
    pytest.param({"input": 7}, "input", "must be a string, a list of strings", id="input number"),
    pytest.param({"input": {"text": "a"}}, "input", "must be a string, a list of strings", id="input object"),
    pytest.param({"input": ["a", 7]}, "input[1]", "must be a string or a list", id="text beside a number"),
    pytest.param({"input": ["a", None]}, "input[1]", "must be a string or a list", id="text beside null"),
    pytest.param({"input": [{"text": "a"}]}, "input[0]", "must be a string or a list", id="an object"),
    pytest.param({"input": [7, "a"]}, "input[1]", "must be an integer token id", id="id beside text"),
    pytest.param({"input": [7, 7.0]}, "input[1]", "must be an integer token id", id="float for an id"),
    pytest.param({"input": [True, 7]}, "input[0]", "must be a string or a list", id="boolean for an id"),
    pytest.param({"input": [7, True]}, "input[1]", "must be an integer token id", id="boolean after an id"),
    pytest.param({"input": [[7], [7, "a"]]}, "input[1][1]", "must be an integer token id", id="text in a list"),
    pytest.param({"input": [2**31]}, "input[0]", "must be a token id from 0 to", id="2**31"),
    pytest.param({"input": [[VOCAB_SIZE]]}, "input[0][0]", "must be a token id from 0 to 2999", id="V"),
    pytest.param({"input": []}, "input", "is empty", id="BL-065 []"),
    pytest.param({"input": ""}, "input", "is empty", id="BL-065 ''"),
    pytest.param({"input": " "}, "input", "is empty", id="BL-065 ' '"),
    pytest.param({"input": [""]}, "input[0]", "is empty", id="BL-065 ['']"),
    pytest.param({"input": [[]]}, "input[0]", "is empty", id="BL-065 [[]]"),
    pytest.param({"input": ["a", "", "b"]}, "input[1]", "is empty", id="BL-065 one of three"),
    pytest.param({"input": "the " * 63}, "input", "has 65 tokens; the limit is 64", id="long text"),
    pytest.param({"input": [7] * 65}, "input", "has 65 tokens; the limit is 64", id="long ids"),
    pytest.param({"input": [[7]] * 2049}, "input", "holds 2049 rows; the limit for one request is 2048", id="BL-189"),
    pytest.param({"model": None}, "model", "valid string", id="model null"),
    pytest.param({"model": ""}, "model", "at least 1", id="model empty"),
    pytest.param({"model": "m" * 257}, "model", "at most 256", id="model of 257"),
    pytest.param({"user": 7}, "user", "valid string", id="user number"),
    pytest.param({"encoding_format": "BASE64"}, "encoding_format", FORMATS, id="BL-179 BASE64"),
    pytest.param({"encoding_format": "hex"}, "encoding_format", FORMATS, id="BL-179 hex"),
    pytest.param({"encoding_format": None}, "encoding_format", FORMATS, id="BL-179 null"),
    pytest.param({"encoding_format": ["float"]}, "encoding_format", FORMATS, id="BL-179 a list"),
    pytest.param({"dimensions": 0}, "dimensions", "greater than or equal to 1", id="BL-075 0"),
    pytest.param({"dimensions": -1}, "dimensions", "greater than or equal to 1", id="BL-075 -1"),
    pytest.param({"dimensions": 9}, "dimensions", "must be from 1 to 8", id="BL-075 d+1"),
    pytest.param({"dimensions": 10**9}, "dimensions", "must be from 1 to 8", id="BL-075 10**9"),
    pytest.param({"dimensions": 7}, "dimensions", "must be 8: this model was not trained for", id="BL-075 d-1"),
    pytest.param({"dimensions": 1}, "dimensions", "must be 8: this model was not trained for", id="BL-075 1"),
    pytest.param({"dimensions": "8"}, "dimensions", "valid integer", id="BL-075 text"),
    pytest.param({"dimensions": 8.5}, "dimensions", "integer", id="BL-075 a fraction"),
    pytest.param({"dimensions": 8.0}, "dimensions", "integer", id="BL-075 a float"),
    pytest.param({"dimensions": True}, "dimensions", "valid integer", id="BL-075 true"),
    pytest.param({"dimensions": 10**30}, "dimensions", "integer", id="BL-075 10**30"),
]


@pytest.mark.parametrize(("change", "param", "fragment"), WRONG_FIELDS)
def test_wrong_field(change: dict[str, Any], param: str, fragment: str, server: Server) -> None:
    """Each mistake is 400 with the field's name in OpenAI's words and what would be right; nobody is called."""
    error = error_of(server.post("/v1/embeddings", openai("the") | change), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"].startswith(f"`{param}` ")
    assert fragment in error["message"]
    assert server.num_calls() == 0


@pytest.mark.parametrize("field", ["input", "model"])
def test_missing_field(field: str, server: Server) -> None:
    """A required field that is not there is named."""
    body = {key: value for key, value in openai("the").items() if key != field}
    assert error_of(server.post("/v1/embeddings", body), 400)["message"] == f"`{field}` is missing"


@pytest.mark.parametrize("name", ["does-not-exist", "../x", "Minilm", "minilm ", "other@v1", "text-embedding-3-small"])
def test_bl_092_unknown_and_forbidden_look_the_same(name: str, server: Server) -> None:
    """A model that does not exist and one of another tenant give the same bytes, with `model` as the field."""
    reference = server.post("/v1/embeddings", openai("the", model="nothing"))
    response = server.post("/v1/embeddings", openai("the", model=name))
    assert error_of(response, 404)["param"] == "model"
    assert (response.content, response.headers) == (reference.content, reference.headers)


def test_forbidden_model_is_not_told_by_its_dimensions(server: Server) -> None:
    """Whether a name exists shows in no other field either."""
    forbidden = server.post("/v1/embeddings", openai("the", model="other@v1", dimensions=10**6))
    assert forbidden.content == server.post("/v1/embeddings", openai("the", model="x", dimensions=10**6)).content


def test_bl_181_ids_of_another_tokenizer(server: Server) -> None:
    """Ids that OpenAI's tokenizer made are refused when outside the vocabulary and are taken as ours when inside."""
    error = error_of(server.post("/v1/embeddings", openai([CL100K_HELLO_WORLD])), 400)
    assert (error["code"], error["param"]) == ("token_id_out_of_range", "input[0][0]")
    inside = server.post("/v1/embeddings", openai([[CL100K_HELLO_WORLD[1]]]))
    assert np.array_equal(embeddings(inside), [vector([1917])])


def test_model_that_is_down(server: Server) -> None:
    """503 with the time to come again."""
    response = server.post("/v1/embeddings", openai("the", model="down@v1"))
    assert error_of(response, 503)["code"] == "revision_unavailable"
    assert response.headers["retry-after"] == "1"


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["the", ["the"], THE, [THE]], ids=["str", "[str]", "[int]", "[[int]]"])
def test_bl_073_every_shape_of_one_text_agrees(given: object, server: Server) -> None:
    """All four shapes give one vector and the same usage; a list of ids is one input, not three."""
    response = server.post("/v1/embeddings", openai(given))
    assert np.array_equal(embeddings(response), [vector(THE)])
    assert response.json()["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_bl_183_whole_answer(server: Server) -> None:
    """The answer has OpenAI's fields and no others; `model` is the revision that answered; `user` is accepted."""
    body = server.post("/v1/embeddings", openai(["the", "the the"], user="someone")).json()
    data = body.pop("data")
    assert body == {"object": "list", "model": "minilm@v1", "usage": {"prompt_tokens": 7, "total_tokens": 7}}
    assert [list(each) for each in data] == [["object", "index", "embedding"]] * 2
    assert [(each["object"], each["index"]) for each in data] == [("embedding", 0), ("embedding", 1)]


def test_bl_182_order_survives_the_split(server: Server) -> None:
    """Texts and ids of both buckets, mixed, come back in order."""
    rows = [[index, *[7] * (index * 5 % 64)] for index in range(100)]
    assert np.array_equal(embeddings(server.post("/v1/embeddings", openai(rows))), np.stack([*map(vector, rows)]))
    mixed = embeddings(server.post("/v1/embeddings", openai(["the", THE, [9] * 30])))
    assert np.array_equal(mixed, np.stack([vector(THE), vector(THE), vector([9] * 30)]))


def test_bl_179_base64_equals_floats(server: Server) -> None:
    """base64 is the little-endian float32 of the same numbers, 4 bytes each."""
    floats = embeddings(server.post("/v1/embeddings", openai(["the", [9] * 30], encoding_format="float")))
    body = server.post("/v1/embeddings", openai(["the", [9] * 30], encoding_format="base64")).json()
    decoded = [base64.b64decode(each["embedding"], validate=True) for each in body["data"]]
    assert [len(each) for each in decoded] == [4 * DIMENSION] * 2
    assert np.array_equal(np.frombuffer(b"".join(decoded), dtype="<f4").reshape(2, -1), floats)


@pytest.mark.parametrize("dimensions", [1, 3, DIMENSION - 1])
@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_bl_075_shorter_vectors_where_the_model_allows(dimensions: int, encoding_format: str, server: Server) -> None:
    """A shortened vector is the beginning of the whole one, made a unit vector again."""
    asked = openai(["the", [9] * 30], model="other@v1", dimensions=dimensions, encoding_format=encoding_format)
    data = server.post("/v1/embeddings", asked, key=GLOBEX).json()["data"]
    whole = np.stack([vector(THE), vector([9] * 30)])[:, :dimensions]
    expected = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    assert np.allclose([_floats(each["embedding"]) for each in data], expected, atol=1e-6)


def _floats(value: object) -> NDArray[np.float32]:
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value), dtype="<f4")
    return np.array(value, dtype=np.float32)


@pytest.mark.parametrize(("model", "key"), [("minilm", ACME), ("other@v1", GLOBEX)], ids=["fixed", "matryoshka"])
def test_bl_075_whole_dimension_is_always_allowed(model: str, key: str, server: Server) -> None:
    """Asking for the model's own width changes nothing, bit for bit."""
    response = server.post("/v1/embeddings", openai("the", model=model, dimensions=DIMENSION), key=key)
    assert np.array_equal(embeddings(response), [vector(THE)])


@pytest.mark.parametrize("number", [33, 2048])
def test_bl_189_many_texts(number: int, server: Server) -> None:
    """As many texts as OpenAI takes are answered, all of them."""
    assert len(embeddings(server.post("/v1/embeddings", openai(["the"] * number)))) == number


# ---- models ----------------------------------------------------------------------------------------------------------


def ids(response: httpx.Response) -> list[str]:
    """What a model list holds."""
    return [entry["id"] for entry in response.json()["data"]]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        pytest.param(ACME, ["minilm@v1"], id="its own, without what is down"),
        pytest.param(GLOBEX, ["other@v1"], id="another tenant's are not shown"),
        pytest.param(ADMIN, ["minilm@v1", "other@v1"], id="all globs"),
    ],
)
def test_models_of_a_tenant(key: str, expected: list[str], server: Server) -> None:
    """A tenant sees the revisions that it could use right now."""
    assert ids(server.get("/v1/models", key=key)) == expected


def test_entry_of_a_model(server: Server) -> None:
    """An entry has OpenAI's four fields and what a caller must know to send good requests."""
    response = server.get("/v1/models")
    assert response.json() == {
        "object": "list",
        "data": [
            {
                "id": "minilm@v1",
                "object": "model",
                "created": 1_700_000_000,
                "owned_by": "raggedserve",
                "revision": "minilm@v1",
                "aliases": ["minilm"],
                "task": "embed",
                "dimension": DIMENSION,
                "max_tokens": 64,
                "buckets": [16, 64],
                "vocab_size": VOCAB_SIZE,
                "layout": "ragged",
                "dtype": "float32",
                "attention_backend": "fake",
            }
        ],
    }


def test_model_that_comes_up_appears(tmp_path: Path) -> None:
    """The list follows the applications without a restart."""
    with Server(tmp_path) as server:
        server.connect.applications["down-v1"] = revision_info("down@v1")
        server.run(server.rounds.next())
        assert ids(server.get("/v1/models")) == ["minilm@v1", "down@v1"]


def test_alias_moves(tmp_path: Path) -> None:
    """After a reconfigure the alias answers with the other revision, and the old name still works."""
    with Server(tmp_path) as server:
        server.run(server.ingress.reconfigure(SETTINGS | {"aliases": {"minilm": "other@v1"}}))
        moved = server.post("/v1/embeddings", openai("the"), key=ADMIN).json()["model"]
        named = server.post("/v1/embeddings", openai("the", model="minilm@v1"), key=ADMIN).json()["model"]
    assert (moved, named) == ("other@v1", "minilm@v1")
