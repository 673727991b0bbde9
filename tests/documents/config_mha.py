"""Section 五、项目代码 of the note that begins with 原论文缩放点积注意力结构如下."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class AttentionOutput:
    hidden_states: Tensor
    attn_scores: Tensor


class MultiHeadAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.hidden_size = config["d_model"]
        self.num_heads = config["num_heads"]
        assert self.hidden_size % self.num_heads == 0, (
            f"Hidden size must be divisible by num_heads but got {self.hidden_size} and {self.num_heads}"
        )
        self.head_dim = self.hidden_size // self.num_heads

        self.Wq = nn.Linear(self.hidden_size, self.hidden_size, bias=False)
        self.Wk = nn.Linear(self.hidden_size, self.hidden_size, bias=False)
        self.Wv = nn.Linear(self.hidden_size, self.hidden_size, bias=False)
        self.Wo = nn.Linear(self.hidden_size, self.hidden_size, bias=False)

    def _split_heads(self, x):
        bs, seq_len, _ = x.shape
        x = x.view(bs, seq_len, self.num_heads, self.head_dim)
        return x.permute(0, 2, 1, 3)

    def _merge_heads(self, x):
        bs, _, seq_len, _ = x.shape
        return x.permute(0, 2, 1, 3).reshape(bs, seq_len, self.hidden_size)

    def forward(self, querys, keys, values, attn_mask=None):
        querys = self._split_heads(self.Wq(querys))
        keys = self._split_heads(self.Wk(keys))
        values = self._split_heads(self.Wv(values))

        qk_logits = torch.matmul(querys, keys.mT)
        if attn_mask is not None:
            attn_mask = attn_mask[:, :, : querys.shape[-2], : keys.shape[-2]]
            qk_logits += attn_mask * -1e9
        attn_scores = F.softmax(qk_logits / (self.head_dim**0.5), dim=-1)

        embeds = torch.matmul(attn_scores, values)
        embeds = self.Wo(self._merge_heads(embeds))

        return AttentionOutput(hidden_states=embeds, attn_scores=attn_scores)
