"""``anychip.fuse(model)``: a model as it is, with ``anychip.ops`` in the place of its own code.

Works on plain torch modules and on decoders of Hugging Face transformers, which is never imported.
docs/fusing.md is the guide. ``recognition`` finds what can be replaced, ``probe`` proves it,
``fused`` does it, and one module per kind (``norm``, ``activation``, ``rope``, ``attention``,
``loss``) says how the operator is called and when the model's own code has to serve a call;
``rope_probe`` proves what ``rope`` says, and ``masks`` reads those of attention.
"""

from anychip.fusion.recognition import fuse, unfuse
from anychip.fusion.report import Report

__all__ = ["Report", "fuse", "unfuse"]
