"""Whether the code that computes logits was edited: other programs have their own code for them."""

import hashlib
import inspect
import re

from model.core import ops
from model.gpt import GPT, MLP, Attention, Block, Norm
from train.base.errors import CheckpointError

# Of the code without comments and docstrings. After an edit that does not change logits (see
# `python -m train.tools.check --only export`), enter the digest that the error message shows.
DIGESTS = {
    Norm: "e971dbb67989", Attention: "2041b8173462", MLP: "f8c94b5ac696", Block: "20eae262ee47",
    GPT.trunk: "0bb574f189da", GPT.logits: "98dcd882a829", ops.finish_logits: "c15204451b0a",
    ops.RMSNorm: "710742aed2a8", ops.apply_rope: "095e2912c1ed", ops.rope_table: "b9defdbf4b50",
    ops.rope_frequencies: "624421f2e41c", ops.limit_to_window: "e8bb3d5ba27a"}


def digest(code):
    """Return the digest of the source of a function or class."""
    text = re.sub(r'"""[\s\S]*?"""|#.*', "", inspect.getsource(code))
    return hashlib.sha256("".join(text.split()).encode()).hexdigest()[:12]


def check_formulas():
    """Raise CheckpointError if code that computes logits is not the code that was compared with
    other programs."""
    edited = [f"{f.__qualname__} ({digest(f)})" for f, known in DIGESTS.items()
              if known != digest(f)]
    if edited:
        raise CheckpointError(f"edited since exports were compared with other programs: "
                              f"{', '.join(edited)}; if the logits are the same, enter the digest "
                              "in model/convert/formulas.py")
