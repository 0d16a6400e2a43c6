"""Texts and ids to what the model gets, with the bundled model's own tokenizer as the reference."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import Tokenizer

from batching.errors import EmptyInput, InputTooLong, TokenIdOutOfRange, TokenServeError
from deployments.tokenization import EncodedInput, InputEncoder
from tests.deployments.fakes import VOCAB_SIZE, bundled_tokenizer, small_tokenizer

CLS, SEP = 101, 102
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def encoder() -> InputEncoder:
    """The bundled tokenizer with room for 16 tokens."""
    return InputEncoder(bundled_tokenizer(), max_tokens=MAX_TOKENS, vocab_size=30522)


@pytest.fixture(scope="module")
def reference() -> Tokenizer:
    """The same file, used as its library documents, cutting at 16 tokens."""
    tokenizer = Tokenizer.from_str(bundled_tokenizer())
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length=MAX_TOKENS)
    tokenizer.encode_special_tokens = True
    return tokenizer


def outcome(encoder: InputEncoder, value: object, *, truncate: bool = False) -> EncodedInput | TokenServeError:
    """What became of one input."""
    given = np.array(value, dtype=np.int32) if isinstance(value, list) else value
    (only,) = encoder.encode([given], ["inputs[0]"], truncate=truncate)  # type: ignore[list-item]
    return only


def ids(encoder: InputEncoder, value: object, *, truncate: bool = False) -> list[int]:
    """The ids of an input that must be good."""
    encoded = outcome(encoder, value, truncate=truncate)
    assert isinstance(encoded, EncodedInput)
    assert encoded.token_ids.dtype == np.int32
    return encoded.token_ids.tolist()


@pytest.mark.parametrize(
    "text", ["", " ", "\n\t", "\u200b", "\ufeff", "\x00", "\u00a0 \u2003"], ids=lambda text: ascii(text)
)
def test_bl_065_text_without_a_token_of_its_own_is_empty(encoder: InputEncoder, text: str) -> None:
    """Blanks in every form are an error that names the input, with and without truncation."""
    for truncate in (False, True):
        error = outcome(encoder, text, truncate=truncate)
        assert isinstance(error, EmptyInput)
        assert error.param == "inputs[0]"


@pytest.mark.parametrize(
    ("value", "error"),
    [
        pytest.param([], EmptyInput("inputs[0]"), id="no ids"),
        pytest.param([-1], TokenIdOutOfRange("inputs[0][0]", VOCAB_SIZE), id="negative"),
        pytest.param([0, VOCAB_SIZE], TokenIdOutOfRange("inputs[0][1]", VOCAB_SIZE), id="V"),
        pytest.param([0, 1, VOCAB_SIZE + 1], TokenIdOutOfRange("inputs[0][2]", VOCAB_SIZE), id="V+1"),
        pytest.param([100257], TokenIdOutOfRange("inputs[0][0]", VOCAB_SIZE), id="an id of another tokenizer"),
        pytest.param([1] * 17, InputTooLong("inputs[0]", 17, 16), id="one id too many"),
        pytest.param([VOCAB_SIZE] * 17, TokenIdOutOfRange("inputs[0][0]", VOCAB_SIZE), id="both"),
        pytest.param("the " * 15, InputTooLong("inputs[0]", 17, 16), id="one token too many"),
    ],
)
def test_bl_069_bad_inputs_name_position_and_limit(value: object, error: TokenServeError) -> None:
    """Each error carries the place and the limit."""
    small = InputEncoder(small_tokenizer(), max_tokens=MAX_TOKENS, vocab_size=VOCAB_SIZE)
    found = outcome(small, value)
    assert (type(found), getattr(found, "args", None)) == (type(error), error.args)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_text_is_refused_where_only_special_tokens_fit(max_tokens: int) -> None:
    """Truncation never leaves a text without a token of its own."""
    tiny = InputEncoder(small_tokenizer(), max_tokens=max_tokens, vocab_size=VOCAB_SIZE)
    error = outcome(tiny, "the", truncate=True)
    assert isinstance(error, InputTooLong)
    assert (error.num_tokens, error.limit) == (3, max_tokens)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param([0], [0], id="id 0"),
        pytest.param([VOCAB_SIZE - 1], [VOCAB_SIZE - 1], id="V-1"),
        pytest.param([7] * 16, [7] * 16, id="exactly the limit"),
        pytest.param([CLS, 7, SEP], [CLS, 7, SEP], id="special tokens given"),
    ],
)
def test_ids_are_used_as_given(value: list[int], expected: list[int]) -> None:
    """Nothing is added to token ids and nothing is taken away."""
    assert ids(InputEncoder(small_tokenizer(), max_tokens=MAX_TOKENS, vocab_size=VOCAB_SIZE), value) == expected


def test_ids_are_cut_only_when_asked(encoder: InputEncoder) -> None:
    """`truncate` keeps the beginning of given ids and says that it cut."""
    cut, whole = outcome(encoder, list(range(20)), truncate=True), outcome(encoder, [1, 2], truncate=True)
    assert isinstance(cut, EncodedInput)
    assert isinstance(whole, EncodedInput)
    assert (cut.token_ids.tolist(), cut.is_truncated) == (list(range(16)), True)
    assert (whole.token_ids.tolist(), whole.is_truncated) == ([1, 2], False)


TEXTS = [
    "hello",
    "...",
    "A first sentence.",
    "naïve café 😀",
    "ab\x00cd",
    "über " * 40,
    "x" * 500,
    "a " * 13 + "unbelievably",
    "the " * 14,
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text)[:30])
def test_truncated_text_equals_the_library(encoder: InputEncoder, reference: Tokenizer, text: str) -> None:
    """Cutting our way gives the ids that the tokenizer's own truncation gives, special tokens included."""
    assert ids(encoder, text, truncate=True) == reference.encode(text).ids


def test_bl_017_padding_and_truncation_of_the_file_are_ignored() -> None:
    """The file pads to 128 and cuts at 128; rows of 5 and 202 tokens have neither pads nor an early end."""
    saved = json.loads(bundled_tokenizer())
    assert (saved["padding"]["strategy"], saved["truncation"]["max_length"]) == ({"Fixed": 128}, 128)
    encoder = InputEncoder(bundled_tokenizer(), max_tokens=512, vocab_size=30522)
    assert [len(ids(encoder, text)) for text in ("a b c", "the " * 200)] == [5, 202]


@pytest.mark.parametrize("length", [70_000, 700_000])
def test_bl_050_any_length_can_be_truncated(encoder: InputEncoder, length: int) -> None:
    """Truncation takes texts of any length and gives the first tokens."""
    text = ("word " * (length // 5))[:length]
    assert ids(encoder, text, truncate=True) == ids(encoder, "word " * 14)


def test_bl_061_text_after_a_nul_counts(encoder: InputEncoder) -> None:
    """NUL is removed as the tokenizer defines, and what follows it is read."""
    assert ids(encoder, "ab\x00cd") == ids(encoder, "abcd") != ids(encoder, "ab")


@pytest.mark.parametrize("special", ["[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]", "<|endoftext|>"])
def test_bl_062_special_tokens_in_a_text_are_text(encoder: InputEncoder, special: str) -> None:
    """The name of a special token inside a text gives ordinary pieces, never the special id."""
    inner = ids(encoder, f"a {special} b")[1:-1]
    assert not set(inner) & {0, 100, CLS, SEP, 103}
    assert len(inner) > 3


def test_bl_068_punctuation_is_a_text(encoder: InputEncoder) -> None:
    """Three dots have tokens of their own."""
    assert ids(encoder, "...") == [CLS, 1012, 1012, 1012, SEP]


def test_outcomes_keep_the_order(encoder: InputEncoder) -> None:
    """Texts, ids and errors come back at the place of their input."""
    given = ["hello", np.array([5], dtype=np.int32), "", "the " * 50, np.array([9], dtype=np.int32), "hello"]
    found = encoder.encode(given, [f"inputs[{index}]" for index in range(6)], truncate=False)
    assert [type(item).__name__ for item in found] == [
        "EncodedInput",
        "EncodedInput",
        "EmptyInput",
        "InputTooLong",
        "EncodedInput",
        "EncodedInput",
    ]
    assert [item.param for item in found if isinstance(item, TokenServeError)] == ["inputs[2]", "inputs[3]"]


def test_bl_055_threads_share_one_encoder(encoder: InputEncoder) -> None:
    """Calls that cut and calls that do not, at once, never disturb each other ("Already borrowed")."""
    texts = {False: ["the " * 12, "hello", "a b c"], True: ["the " * 50, "hello", "a b c"]}
    expected = {truncate: [ids(encoder, text, truncate=truncate) for text in texts[truncate]] for truncate in texts}

    def is_right(number: int) -> bool:
        truncate = number % 2 == 0
        return [ids(encoder, text, truncate=truncate) for text in texts[truncate]] == expected[truncate]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(is_right, range(400)))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("word " * 20_000, id="English"),
        pytest.param("\u4e2d\u6587" * 20_000, id="Chinese, no blanks"),
        pytest.param("x" * 300 + " " + "word " * 5_000, id="a word that is one unknown token"),
        pytest.param(" " * 50_000 + "late words " * 50, id="blanks first"),
    ],
)
def test_bl_050_only_the_beginning_of_a_long_text_is_read(
    encoder: InputEncoder, reference: Tokenizer, text: str
) -> None:
    """A cut text has the ids that cutting the whole text would give."""
    assert ids(encoder, text, truncate=True) == reference.encode(text).ids


def test_a_refused_long_text_is_not_read_to_its_end(encoder: InputEncoder) -> None:
    """Its error says how much was read, and that there is more."""
    error = outcome(encoder, "word " * 1_000_000)
    assert isinstance(error, InputTooLong)
    assert error.is_lower_bound
    assert MAX_TOKENS < error.num_tokens < 1000
    assert "has more than" in error.detail
