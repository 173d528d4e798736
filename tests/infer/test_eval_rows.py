"""Views of rows in which only middles count."""
import torch

from nanochat.data.lanes import PADDING
from nanochat.data.tokenizer import FIM_TOKENS, load_tokenizer
from nanochat.infer.eval_rows import from_left_to_right, without_suffixes
from nanochat.infer.loss_eval import with_suffixes


def test_views_of_rows_keep_the_middles_and_leave_out_what_they_say(byte_tokenizer_dir):
    """Of rows with text from left to right, a document with an empty suffix, and one that is cropped in its middle."""
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    bos, pre, suf, mid, sep = map(tokenizer.special, ("<|bos|>", *FIM_TOKENS))
    rows = torch.tensor([[7, bos, 8, bos, pre, 1, 2, suf, 3, mid, 4, 5, sep, bos, 9],
                         [bos, pre, 1, suf, mid, 2, sep, bos, pre, 3, suf, 4, mid, 5, 6]])
    seen = [view(tokenizer, rows) for view in (with_suffixes, without_suffixes, from_left_to_right)]
    for found, counts in seen:
        assert [row[of].tolist() for row, of in zip(found, counts, strict=True)] == [[4, 5], [2, 5, 6]]
    assert [[row[row != PADDING].tolist() for row in found] for found, _ in seen] == [
        rows.tolist(),
        [[7, bos, 8, bos, pre, 1, 2, suf, mid, 4, 5, sep, bos, 9],
         [bos, pre, 1, suf, mid, 2, sep, bos, pre, 3, suf, mid, 5, 6]],
        [[7, bos, 8, bos, 1, 2, 4, 5, bos, 9], [bos, 1, 2, bos, 3, 5, 6]]]
