"""The note 注意力机制: multi-head attention without an output projection.

The code in the note is a script. Here it is a function of the script's variables X, num_heads, W_q, W_k and W_v.
"""

import torch


def split_heads(x, num_heads, head_dim):
    return x.view(x.size(0), num_heads, head_dim)


def attention(X, num_heads, W_q, W_k, W_v):
    Q = W_q(X)
    K = W_k(X)
    V = W_v(X)
    head_dim = Q.size(-1) // num_heads

    Q = split_heads(Q, num_heads, head_dim)
    K = split_heads(K, num_heads, head_dim)
    V = split_heads(V, num_heads, head_dim)

    Q = Q.transpose(0, 1)
    K = K.transpose(0, 1)
    V = V.transpose(0, 1)

    outputs = []
    for i in range(num_heads):
        q = Q[i]
        k = K[i]
        v = V[i]
        scores = torch.matmul(q, k.T) / (head_dim**0.5)
        attn_weights = torch.softmax(scores, dim=1)
        out = torch.matmul(attn_weights, v)
        outputs.append(out)

    return torch.cat(outputs, dim=-1)
