"""``anychip.fuse(model)``: a model as it is, with ``anychip.ops`` in the place of its own code.

Works on plain torch modules and on decoders of Hugging Face transformers, which is never imported.
docs/fusing.md is the guide. ``table`` says what is looked for, ``recognition`` goes through a
model, ``probe`` proves each replacement, ``fused`` does it, and one module per kind (``layers``,
``rope``, ``attention`` with ``masks``, ``loss``) says how the operator is called and when the
model's own code has to serve a call.
"""

from anychip.fusion.recognition import fuse, unfuse
from anychip.fusion.report import FusionReport

__all__ = ["FusionReport", "fuse", "unfuse"]
