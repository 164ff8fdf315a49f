"""Checks of a model's shape that a file describes, before the model is built."""

from train.base.fields import fields_by_name, parse_value


def check_shape(shape, weights):
    """ValueError if `shape`, a GPTConfig read from a file, has invalid values or cannot be the
    shape of `weights` {name: tensor} from the same file."""
    known = fields_by_name(shape)
    for name in known:
        check_value(name, getattr(shape, name), known)
    check_size(shape, weights)


def check_value(name, value, known):
    """Return `value` parsed as the key `name` of `known`. ValueError names the key."""
    try:
        return parse_value(known[name], value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_size(shape, weights):
    """ValueError if `shape` is much too large for `weights`: the model that is built before the
    tensors are compared (blocks, tables of positions and tokens) would exhaust time or memory."""
    numbers = sum(t.numel() for t in weights.values())
    positions = shape.block_size * max(shape.head_dim or 0, shape.n_embd // shape.n_head)
    for value, limit, what in ((shape.n_layer, max(256, len(weights)), "blocks"),
                               (positions, max(1 << 24, numbers), "numbers of positions"),
                               (shape.vocab_size or 0, max(1 << 20, numbers), "token ids")):
        if not 0 <= value <= limit:
            raise ValueError(f"a shape of {value:,} {what} for {len(weights):,} tensors of "
                             f"{numbers:,} numbers: its model_args or config are of another model")
