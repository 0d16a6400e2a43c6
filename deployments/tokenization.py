"""Inputs to token ids, with the model's own special tokens and without any state that a request could change."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from batching.errors import EmptyInput, InputTooLong, TokenIdOutOfRange, TokenServeError

TokenIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedInput:
    """`token_ids` [n] int32 as the model gets them, and whether the end of the input was cut off."""

    token_ids: TokenIds
    is_truncated: bool = False


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
        encodings = self._tokenizer.encode_batch_fast([inputs[index] for index in texts]) if texts else []
        ids_of_texts = {index: encoding.ids for index, encoding in zip(texts, encodings, strict=True)}
        return [
            self._text(value, ids_of_texts[index], param, truncate=truncate)
            if isinstance(value, str)
            else self._given_ids(value, param, truncate=truncate)
            for index, (value, param) in enumerate(zip(inputs, params, strict=True))
        ]

    def _text(self, text: str, token_ids: list[int], param: str, *, truncate: bool) -> EncodedInput | TokenServeError:
        if len(token_ids) <= self._num_special:
            return EmptyInput(param, "is empty: it holds no token of its own")
        if len(token_ids) <= self._max_tokens:
            return EncodedInput(token_ids=np.array(token_ids, dtype=np.int32))
        if not truncate or self._max_tokens <= self._num_special:  # no room for a token of the text
            return InputTooLong(param, len(token_ids), self._max_tokens)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        encoding.truncate(self._max_tokens - self._num_special)
        cut = self._tokenizer.post_process(encoding).ids
        return EncodedInput(token_ids=np.array(cut, dtype=np.int32), is_truncated=True)

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
