"""The notebook "Attention": self-attention, self-attention with mask and dropout, and multi-head attention."""

import math

import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, d_model, d_k, d_v):
        super().__init__()
        self.d_model = d_model
        self.d_k = d_k
        self.d_v = d_v
        self.W_q = nn.Linear(self.d_model, self.d_k)
        self.W_k = nn.Linear(self.d_model, self.d_k)
        self.W_v = nn.Linear(self.d_model, self.d_v)
        self.output_proj = nn.Linear(self.d_v, self.d_model)

    def forward(self, x):
        Q = self.W_q(x)
        K = self.W_k(x)
        V = self.W_v(x)
        attention_score = torch.matmul(Q, K.transpose(-2, -1)) / torch.sqrt(
            torch.tensor(self.d_k, dtype=torch.float32, device=x.device)
        )
        attention_weight = torch.softmax(attention_score, dim=-1)
        output = attention_weight @ V
        output = self.output_proj(output)
        return output


class SelfAttentionV2(nn.Module):
    def __init__(self, d_model, d_k, d_v, dropout_rate=0.1):
        super().__init__()
        self.d_model = d_model
        self.d_k = d_k
        self.d_v = d_v
        self.dropout_rate = dropout_rate
        self.W_q = nn.Linear(self.d_model, self.d_k)
        self.W_k = nn.Linear(self.d_model, self.d_k)
        self.W_v = nn.Linear(self.d_model, self.d_v)
        self.dropout = nn.Dropout(self.dropout_rate)
        self.output_proj = nn.Linear(self.d_v, self.d_model)

    def forward(self, x, attention_mask=None):
        Q = self.W_q(x)
        K = self.W_k(x)
        V = self.W_v(x)
        attention_score = torch.matmul(Q, K.transpose(-2, -1)) / torch.sqrt(
            torch.tensor(self.d_k, dtype=torch.float32, device=x.device)
        )
        if attention_mask is not None:
            attention_score = attention_score.masked_fill(attention_mask == 0, float("-inf"))
        attention_weight = torch.softmax(attention_score, dim=-1)
        attention_weight = self.dropout(attention_weight)
        output = attention_weight @ V
        output = self.output_proj(output)
        return output


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, head_num, dropout_rate=0.1):
        super().__init__()
        self.d_model = d_model
        self.dropout_rate = dropout_rate
        self.head_num = head_num
        self.head_dim = self.d_model // head_num
        self.W_q = nn.Linear(self.d_model, self.d_model)
        self.W_k = nn.Linear(self.d_model, self.d_model)
        self.W_v = nn.Linear(self.d_model, self.d_model)
        self.dropout = nn.Dropout(self.dropout_rate)
        self.output_proj = nn.Linear(self.d_model, self.d_model)
        self.scale = math.sqrt(self.head_dim)

    def forward(self, query, key=None, value=None, attention_mask=None):
        if key is None:
            key = query
        if value is None:
            value = query
        batch_size, seq_len, _ = query.size()

        Q = self.W_q(query)
        K = self.W_k(key)
        V = self.W_v(value)

        q_state = Q.view(batch_size, seq_len, self.head_num, self.head_dim).transpose(1, 2)
        k_state = K.view(batch_size, K.size(1), self.head_num, self.head_dim).transpose(1, 2)
        v_state = V.view(batch_size, V.size(1), self.head_num, self.head_dim).transpose(1, 2)

        attention_score = torch.matmul(q_state, k_state.transpose(-2, -1)) / self.scale

        if attention_mask is not None:
            if attention_mask.dim() == 2:
                attention_mask = attention_mask[:, None, None, :]
            attention_score = attention_score.masked_fill(attention_mask == 0, float("-inf"))

        attention_weight = torch.softmax(attention_score, dim=-1)
        attention_weight = self.dropout(attention_weight)
        output = torch.matmul(attention_weight, v_state)

        output = output.transpose(1, 2).contiguous()
        output = output.view(batch_size, seq_len, -1)
        output = self.output_proj(output)
        return output, attention_weight
