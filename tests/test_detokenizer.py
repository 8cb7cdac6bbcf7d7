"""Text piece by piece: the text of all ids at once, and no work that grows with what is no text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nanovllm.utils.detokenizer import Detokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def byte_ids(tokenizer) -> list[int]:
    """The id of each byte, by the alphabet of byte-level tokenizers."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(256, 512))
    return [tokenizer.convert_tokens_to_ids(chr(b if b in shown else next(hidden))) for b in range(256)]


@given(st.lists(st.one_of(st.binary(max_size=40), st.text("aé語😀\ufffd", max_size=8).map(str.encode)), max_size=6))
def test_the_text_of_bytes_never_changes_and_is_that_of_all_at_once(tokenizer, byte_ids, parts):
    ids = [byte_ids[b] for b in b"".join(parts)]
    detokenizer, whole = Detokenizer(tokenizer, True), tokenizer.decode(ids)
    for token_id in ids:
        before = detokenizer.text
        detokenizer.append(token_id)
        assert detokenizer.text.startswith(before)
    assert whole.startswith(detokenizer.text)
    if not whole.endswith("\ufffd"):
        assert detokenizer.text == whole


@pytest.mark.parametrize("bytes_", [b"\xff", b"\x80", b"\xf0\x9f", b"\xe8\xaa\x9e\xff", "\ufffd".encode()])
def test_a_long_run_without_characters_is_given_out_and_costs_no_more_per_token(tokenizer, byte_ids, bytes_):
    ids = [byte_ids[b] for b in bytes_ * 400]
    detokenizer, decoded = Detokenizer(tokenizer, True), []
    decode = detokenizer._decode
    detokenizer._decode = lambda part: decoded.append(len(part)) or decode(part)
    for token_id in ids:
        detokenizer.append(token_id)
    whole = tokenizer.decode(ids)
    assert whole.startswith(detokenizer.text) and len(whole) - len(detokenizer.text) < 30
    assert max(decoded) < 30
