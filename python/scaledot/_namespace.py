"""The namespace of scaledot's ops in torch: ``torch.ops.scaledot``.

A kernel for the Hugging Face hub has another one, because several versions of it may be loaded in one process:
scaledot_build.hub_kernel replaces this file there.
"""

NAMESPACE = "scaledot"
