"""Reads tokens with a model and caches their keys and values: in place on a CPU or GPU, in static shapes on XLA."""
from os.path import commonprefix  # of any two lists

import torch
import torch.nn.functional as F

from nanochat.device.programs import one_program
from nanochat.infer.quantize import Int8GPT
from nanochat.infer.sample import never_stop
from nanochat.model.config import in_whole
from nanochat.model.layers import causal_mask

BLOCK = 64  # positions to read at a time
ROWS = 4  # see BlockCache
MIN_PREFILL_LEN = 64  # on XLA


class KVCache:
    """Keys and values of each layer, (B, H_kv, max_len, head_dim). If keys are shifted, also `befores`, (B, max_len +
    1, C_kv): at each position the keys of the previous one. The shapes never change, so XLA compiles once."""

    def __init__(self, config, batch_size, max_len, dtype, device):
        def zeros(*shape):
            return [torch.zeros(batch_size, *shape, dtype=dtype, device=device) for _ in range(config.n_layer)]

        self.keys = zeros(config.n_kv_head, max_len, config.head_dim)
        self.values = zeros(config.n_kv_head, max_len, config.head_dim)
        self.befores = []
        if config.key_shift:
            self.befores = zeros(max_len + 1, config.n_kv_head * config.head_dim)

    def keys_before(self, layer, k, positions):
        """Keeps k (B, T, C_kv) of `layer` at `positions`, as in attend. Returns the keys of the previous positions,
        (B, T, C_kv); the first position gets 0."""
        # Row p of `befores` is the key of position p - 1, and row 0 stays 0.
        befores = self.befores[layer]
        if positions.dim() == 1:
            self.befores[layer] = befores = befores.index_copy(1, positions + 1, k)
            return befores.index_select(1, positions)
        everywhere = torch.arange(befores.size(1), device=k.device)  # the mask below is (B, max_len + 1, 1)
        self.befores[layer] = befores = torch.where((positions + 1 == everywhere).mT, k, befores)
        return befores.gather(1, positions.expand(-1, 1, k.size(-1)))

    def attend(self, layer, q, k, v, positions, window):
        """Writes k and v of `layer` to `positions`. Returns the attention of q (B, H, T, head_dim) to everything in the
        cache at or before each position.

        positions: (T,), the same for every row, or (B, 1, 1), one for each row's only token.
        """
        everywhere = torch.arange(self.keys[layer].size(2), device=k.device)
        if positions.dim() == 1:
            keys = self.keys[layer].index_copy(2, positions, k)
            values = self.values[layer].index_copy(2, positions, v)
        else:
            is_here = (positions == everywhere)[..., None]  # (B, 1, max_len, 1)
            keys = torch.where(is_here, k, self.keys[layer])
            values = torch.where(is_here, v, self.values[layer])
        self.keys[layer] = keys
        self.values[layer] = values
        mask = causal_mask(positions, everywhere, window)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=q.size(1) != k.size(1))


# A position in the n-th block of 64 attends to the first n blocks, with later positions masked, in products whose rows
# are a multiple of 4. So its result is the same to the last bit whether it is read alone or among others: MKL adds in
# another order for other lengths, and for 1 to 3 rows. Rounding to 8 bits would amplify a difference in the last bit.
class BlockCache(KVCache):
    """A KVCache that is written in place. Positions are slices."""

    def __init__(self, config, batch_size, dtype, device):
        max_len = in_whole(config.max_seq_len, BLOCK)
        super().__init__(config, batch_size, max_len, dtype, device)
        self._everywhere = torch.arange(max_len, device=device)
        self._seen = {}  # window -> the last question and answer of _what_is_seen

    def keys_before(self, layer, k, positions):
        befores = self.befores[layer]
        befores[:, positions.start + 1:positions.stop + 1] = k
        return befores[:, positions].to(k.dtype)

    def copy_prompt(self, other, length):
        """Copies the first `length` positions of another cache, with one row, to each row of this one. The rest gets
        no memory until it is written."""
        for mine, theirs in zip([*self.keys, *self.values], [*other.keys, *other.values], strict=True):
            mine[:, :, :length] = theirs[:, :, :length]
        for mine, theirs in zip(self.befores, other.befores, strict=True):
            mine[:, :length + 1] = theirs[:, :length + 1]

    def attend(self, layer, q, k, v, positions, window):
        """As KVCache.attend. All positions lie in one block."""
        self.keys[layer][:, :, positions] = k
        self.values[layer][:, :, positions] = v
        # The queries of all heads that share keys become rows of one product. Copies of the last row fill it up.
        batch, heads, count, head_dim = q.shape
        queries = q.reshape(batch, k.size(1), -1, head_dim)  # (B, H_kv, H / H_kv × T, head_dim)
        # A cache in bfloat16 is computed with as it is only where the processor has products in bfloat16.
        dtype = self.keys[layer].dtype if torch.cpu._is_avx512_bf16_supported() else q.dtype
        seen, rows, mask = self._what_is_seen(positions.start, count, queries.size(2), window, dtype)
        keys = self.keys[layer][:, :, seen].to(dtype)
        values = self.values[layer][:, :, seen].to(dtype)
        filled = queries.index_select(2, rows).to(dtype)
        found = F.scaled_dot_product_attention(filled, keys, values, attn_mask=mask)
        return found[:, :, :queries.size(2)].reshape(batch, heads, count, head_dim).to(q.dtype)

    def _what_is_seen(self, start, count, num_rows, window, dtype):
        """Returns the slice of positions that `count` positions from `start` see, the number of each row's query among
        `num_rows`, and the additive mask (rows, positions). The answer is cached, because every layer asks."""
        question = start, count, num_rows
        if self._seen.get(window, [None])[0] != question:
            block = start // BLOCK * BLOCK
            begin = 0
            if window is not None:
                begin = max(block - window + 1, 0) // BLOCK * BLOCK
            seen = slice(begin, block + BLOCK)
            rows = torch.arange(num_rows + -num_rows % ROWS, device=self._everywhere.device).clamp_(max=num_rows - 1)
            is_seen = causal_mask(start + rows % count, self._everywhere[seen], window)
            mask = torch.zeros_like(is_seen, dtype=dtype).masked_fill_(~is_seen, -torch.inf)
            self._seen[window] = question, seen, rows, mask
        return self._seen[window][1:]


class Reader:
    """Reads texts one after the other. The common beginning of a text and the previous one is not read again. The
    weights of the model must not change meanwhile."""

    def __init__(self, model, device):
        self.model = model
        self.device = device
        # Beside weights of 8 bits, keys and values of 16 bits, which come faster from memory, lose nothing measurable.
        self.dtype = torch.bfloat16 if isinstance(model, Int8GPT) else model.compute_dtype
        self.cache = BlockCache(model.config, 1, self.dtype, device)
        self.ids = []  # in the cache
        self.num_read = 0  # tokens, in all texts

    def read(self, ids, num_last=1, keep_going=never_stop):
        """Returns the logits (num_last, V), on the CPU, of the tokens that follow each of the last `num_last` of `ids`.
        Returns None once keep_going(), which is called before each block, returns False."""
        # The last tokens are read even if they are in the cache, which holds no logits.
        position = min(len(commonprefix([self.ids, ids])), len(ids) - num_last)
        del self.ids[position:]
        hidden = []  # of each block, (T, C)
        while position < len(ids):
            if not keep_going():
                return None
            end = min(len(ids), position // BLOCK * BLOCK + BLOCK)
            hidden.append(self._hidden([ids[position:end]], self.cache, position)[0])
            self.ids += ids[position:end]
            self.num_read += end - position
            position = end
        return self._logits(torch.cat(hidden)[-num_last:])

    def prefill(self, ids, num_samples, keep_going):
        """Reads the prompt of `num_samples` samples, for decode. Returns the logits (V,) of their first token, or None
        as in read."""
        logits = self.read(ids, 1, keep_going)
        if logits is None:
            return None
        self._samples = BlockCache(self.model.config, num_samples, self.dtype, self.device)
        self._position = len(ids)
        self._samples.copy_prompt(self.cache, len(ids))
        return logits[0]

    def decode(self, tokens):
        """Reads one token of each sample. Returns the logits (num_samples, V) of the next, on the CPU."""
        hidden = self._hidden([[token] for token in tokens], self._samples, self._position)
        self._position += 1
        return self._logits(hidden[:, 0])

    @torch.inference_mode()
    def _hidden(self, ids, cache, position):
        positions = slice(position, position + len(ids[0]))
        return self.model.hidden(torch.tensor(ids, device=self.device), cache, positions)

    @torch.inference_mode()
    def _logits(self, hidden):
        return self.model.logits(hidden).cpu()


# XLA compiles three programs for all texts: one makes the cache; one reads a prompt, padded to a power of two; one
# reads a token of every sample.
class StaticReader:
    """Reads a prompt, and tokens of several samples behind it, in static shapes."""

    def __init__(self, model, dist, num_samples):
        self.model = model
        self.dist = dist
        self.num_samples = num_samples
        self._gathers = model.kernels.whole is not None  # weights, from the other ranks
        with one_program(dist, f"cache {num_samples}"):
            self.cache = KVCache(model.config, num_samples, model.config.max_seq_len, model.compute_dtype, dist.device)

    @torch.no_grad()
    def prefill(self, ids):
        """Reads the prompt of all samples. Returns the logits (V,) of their first token, on the CPU."""
        config = self.model.config
        device = self.dist.device
        length = min(max(MIN_PREFILL_LEN, 1 << (len(ids) - 1).bit_length()), config.max_seq_len)
        padded = torch.tensor([ids + [0] * (length - len(ids))]).to(device)
        last = torch.tensor([len(ids) - 1]).to(device)
        rows = torch.arange(self.num_samples).to(device)
        with one_program(self.dist, f"prefill {length} {self.num_samples}", self._gathers):
            prompt = KVCache(config, 1, config.max_seq_len, self.model.compute_dtype, device)
            # The padding writes to cache positions after the prompt. Generated tokens overwrite them before any
            # position looks at them.
            hidden = self.model.hidden(padded, prompt, torch.arange(length, device=device))  # (1, length, C)
            logits = self.model.logits(hidden.index_select(1, last))[0, 0]  # (V,)
            for name in ("keys", "values", "befores"):
                stacks = getattr(self.cache, name)
                for layer, new in enumerate(getattr(prompt, name)):
                    stacks[layer] = stacks[layer].index_copy(0, rows, new.expand(len(rows), *new.shape[1:]))
        self._position = len(ids)
        return logits.cpu()

    @torch.no_grad()
    def decode(self, tokens):
        """Reads one token of each sample. Returns the logits (num_samples, V) of the next, on the CPU."""
        device = self.dist.device
        ids = torch.tensor(tokens)[:, None].to(device)
        positions = torch.full((len(tokens), 1, 1), self._position).to(device)
        with one_program(self.dist, f"decode {len(tokens)}", self._gathers):
            logits = self.model.logits(self.model.hidden(ids, self.cache, positions))[:, 0]
        self._position += 1
        return logits.cpu()
