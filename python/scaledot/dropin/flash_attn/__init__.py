"""flash-attn's functions, computed by scaledot's kernels::

    from scaledot.dropin.flash_attn import flash_attn_func      # or, where the code imports flash_attn itself:

    import scaledot.dropin.flash_attn
    scaledot.dropin.flash_attn.install()
    from flash_attn import flash_attn_varlen_func
    from flash_attn.bert_padding import pad_input, unpad_input

The signatures are those of flash-attn 2.8.3 (Dao, "FlashAttention-2", 2023). Tensors are (B, L, H, D) or (total, H, D).
The last query is aligned with the last key: causality, windows and ALiBi count from there.

It differs from flash-attn in these points:

- It runs on a CPU too, and takes float32 and float64, as well as bfloat16 and float16. softmax_lse is float64
  for float64.
- D may be any size, value heads may have another size than key heads, and pages of a cache may have any size.
- softcap and dropout may be combined. Dropout draws other random numbers.
- The softmax_lse of a row without keys is -inf. flash-attn gives +inf or -inf, depending on its kernel.
- S_dmask, the third result with return_attn_probs=True, holds the weights that multiplied the values, after softmax,
  dropout and its factor 1 / (1 - dropout_p). It is not rounded up to a multiple of 128, and has no negative numbers.
  With dropout_p=0 it is an empty tensor of shape (0,), as in flash-attn.
- `deterministic` changes nothing: results are always deterministic.
"""

from . import bert_padding
from ._dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from ._install import VERSION, install, uninstall
from ._kvcache import flash_attn_with_kvcache
from ._varlen import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func

__all__ = [
    "VERSION",
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]
