"""Inputs to token ids, with the model's own special tokens and without any state that a request could change."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from batching.errors import EmptyInput, InputTooLong, TokenIdOutOfRange, TokenServeError
from deployments.wire import TokenIds

HEAD_CHARS_PER_TOKEN = 16
"""How much of a text is read at first, per token of the limit: three times what English needs. One request's 16 MB
text would otherwise cost gigabytes and hold every other request up."""
CUT_MARGIN_TOKENS = 16
"""Tokens beyond the limit that a cut text must have: its last ones may differ from those of the whole text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedInput:
    """`token_ids` [n] int32 as the model gets them, and whether the end of the input was cut off."""

    token_ids: TokenIds
    is_truncated: bool = False


class _Head(NamedTuple):
    """The beginning of a text, up to a blank where there is one, and its ids."""

    text: str
    beginning: str
    token_ids: list[int]

    @property
    def is_cut(self) -> bool:
        return len(self.beginning) < len(self.text)


def _head(text: str, num_chars: int) -> str:
    """The first `num_chars` characters of a longer text, but no half word, because a half word has other tokens."""
    if len(text) <= num_chars:
        return text
    beginning = text[:num_chars]
    blank = max(beginning.rfind(" "), beginning.rfind("\n"))
    return beginning[:blank] if blank > num_chars // 2 else beginning


class InputEncoder:
    """Tokenizer and limits of one revision. Calls release the GIL, so run them in a thread; any number at once."""

    def __init__(self, tokenizer_json: str, *, max_tokens: int, vocab_size: int) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        # A file may carry padding and truncation of its own (fastembed issue 703). Both are off here for good: a
        # request that wants truncation gets its own ids cut, because switching the shared tokenizer over races
        # ("Already borrowed", tokenizers issue 537).
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # "[SEP]" inside a user's text is text, not a command to the model.
        self._tokenizer.encode_special_tokens = True
        self._num_special = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        self._max_tokens = max_tokens
        self._head_chars = HEAD_CHARS_PER_TOKEN * max_tokens
        self._vocab_size = vocab_size

    def encode(
        self, inputs: Sequence[str | TokenIds], params: Sequence[str], *, truncate: bool
    ) -> list[EncodedInput | TokenServeError]:
        """One outcome per input, in order; `params` are the inputs' names for errors.

        Texts get the model's special tokens; ids are used exactly as given. The errors are EmptyInput (no ids, or a
        text without a token of its own, such as blanks), TokenIdOutOfRange, and InputTooLong unless `truncate`, which
        keeps the beginning and the special tokens.
        """
        texts = [index for index, value in enumerate(inputs) if isinstance(value, str)]
        heads = {index: _head(str(inputs[index]), self._head_chars) for index in texts}
        encodings = self._tokenizer.encode_batch_fast(list(heads.values())) if texts else []
        ids_of_heads = {index: encoding.ids for index, encoding in zip(texts, encodings, strict=True)}
        return [
            self._text(_Head(value, heads[index], ids_of_heads[index]), param, truncate=truncate)
            if isinstance(value, str)
            else self._given_ids(value, param, truncate=truncate)
            for index, (value, param) in enumerate(zip(inputs, params, strict=True))
        ]

    def _text(self, head: _Head, param: str, *, truncate: bool) -> EncodedInput | TokenServeError:
        head = self._long_enough(head)
        if len(head.token_ids) <= self._num_special:
            return EmptyInput(param, "is empty: it holds no token of its own")
        if len(head.token_ids) <= self._max_tokens:
            return EncodedInput(token_ids=np.array(head.token_ids, dtype=np.int32))
        if not truncate or self._max_tokens <= self._num_special:  # no room for a token of the text
            return InputTooLong(param, len(head.token_ids), self._max_tokens, head.is_cut)
        (encoding,) = self._tokenizer.encode_batch([head.beginning], add_special_tokens=False)
        encoding.truncate(self._max_tokens - self._num_special)
        cut = self._tokenizer.post_process(encoding).ids
        return EncodedInput(token_ids=np.array(cut, dtype=np.int32), is_truncated=True)

    def _long_enough(self, head: _Head) -> _Head:
        """Read on until the text ends or is too long beyond doubt: a text that is refused is never read to its end."""
        num_chars = self._head_chars
        while head.is_cut and len(head.token_ids) <= self._max_tokens + CUT_MARGIN_TOKENS:
            num_chars *= 4
            beginning = _head(head.text, num_chars)
            # As a batch of one: `encode` would hold the GIL, and with it every other request.
            head = _Head(head.text, beginning, self._tokenizer.encode_batch_fast([beginning])[0].ids)
        return head

    def _given_ids(self, token_ids: TokenIds, param: str, *, truncate: bool) -> EncodedInput | TokenServeError:
        if len(token_ids) == 0:
            return EmptyInput(param)
        outside = np.flatnonzero((token_ids < 0) | (token_ids >= self._vocab_size))
        if len(outside):
            return TokenIdOutOfRange(f"{param}[{int(outside[0])}]", self._vocab_size)
        if len(token_ids) <= self._max_tokens:
            return EncodedInput(token_ids=token_ids)
        if not truncate:
            return InputTooLong(param, len(token_ids), self._max_tokens)
        return EncodedInput(token_ids=token_ids[: self._max_tokens], is_truncated=True)
