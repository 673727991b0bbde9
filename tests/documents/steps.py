"""点积注意力的计算流程: all functions of sections 2 to 8 except the plot."""

import math

import torch
import torch.nn.functional as F


def compute_attention_scores(Q, K):
    scores = torch.matmul(Q, K.transpose(-2, -1))
    return scores


def scale_attention_scores(scores, d_k):
    scaling_factor = math.sqrt(d_k)
    scaled_scores = scores / scaling_factor
    return scaled_scores


def apply_mask(scores, mask=None):
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return scores


def compute_attention_weights(scores):
    attention_weights = F.softmax(scores, dim=-1)
    return attention_weights


def apply_attention_weights(attention_weights, V):
    output = torch.matmul(attention_weights, V)
    return output


def scaled_dot_product_attention(Q, K, V, mask=None):
    d_k = Q.size(-1)
    scores = torch.matmul(Q, K.transpose(-2, -1))
    scores = scores / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    attention_weights = F.softmax(scores, dim=-1)
    output = torch.matmul(attention_weights, V)
    return output, attention_weights


def optimized_scaled_dot_product_attention(Q, K, V, mask=None, dropout=None):
    d_k = Q.size(-1)
    scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    max_scores = torch.max(scores, dim=-1, keepdim=True)[0]
    scores = scores - max_scores
    attention_weights = F.softmax(scores, dim=-1)
    if dropout is not None:
        attention_weights = dropout(attention_weights)
    output = torch.matmul(attention_weights, V)
    return output, attention_weights


def create_causal_mask(seq_len):
    mask = torch.tril(torch.ones(seq_len, seq_len))
    return mask


def create_padding_mask(seq_lengths, max_len):
    batch_size = len(seq_lengths)
    mask = torch.zeros(batch_size, max_len, max_len)
    for i, length in enumerate(seq_lengths):
        mask[i, :length, :length] = 1
    return mask


def stable_softmax(scores):
    max_scores = torch.max(scores, dim=-1, keepdim=True)[0]
    stable_scores = scores - max_scores
    exp_scores = torch.exp(stable_scores)
    sum_exp_scores = torch.sum(exp_scores, dim=-1, keepdim=True)
    return exp_scores / sum_exp_scores


def robust_attention(Q, K, V, mask=None, eps=1e-8):
    d_k = Q.size(-1)
    scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    attention_weights = stable_softmax(scores)
    attention_weights = attention_weights + eps
    attention_weights = attention_weights / attention_weights.sum(dim=-1, keepdim=True)
    output = torch.matmul(attention_weights, V)
    return output, attention_weights


def memory_efficient_attention(Q, K, V, chunk_size=512):
    seq_len = Q.size(-2)
    d_k = Q.size(-1)
    output = torch.zeros_like(Q)
    for i in range(0, seq_len, chunk_size):
        end_i = min(i + chunk_size, seq_len)
        Q_chunk = Q[:, :, i:end_i, :]
        scores = torch.matmul(Q_chunk, K.transpose(-2, -1)) / math.sqrt(d_k)
        weights = F.softmax(scores, dim=-1)
        output_chunk = torch.matmul(weights, V)
        output[:, :, i:end_i, :] = output_chunk
    return output


def fused_attention(Q, K, V, mask=None):
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(Q, K, V, attn_mask=mask)
    else:
        return scaled_dot_product_attention(Q, K, V, mask)
