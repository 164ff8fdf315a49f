"""Checks of a GPTConfig that was read from a file, before the model is built."""

from dataclasses import fields

from train.base.fields import parse_value


def check_shape(shape, weights):
    """Raise ValueError if a field of `shape`, a GPTConfig read from a file, has a wrong type or a
    value outside the limits, or if the model would be much too large for `weights` {name: tensor}
    from the same file, see check_size()."""
    for field in fields(shape):
        check_value(field, getattr(shape, field.name), field.name)
    check_size(shape, weights)


def check_value(field, value, name):
    """Return `value` converted to the type of `field`, the dataclass field of a configuration key.
    name: of the key, for the message. Raises ValueError for a value of a wrong type or outside of
    the limits of the key."""
    try:
        return parse_value(field, value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_size(shape, weights):
    """Raise ValueError if `shape`, a GPTConfig or TrainConfig, has far more blocks, positions or
    token ids than `weights` {name: tensor} can have. Without this check, building such a model,
    before the shapes of tensors are compared, would exhaust time or memory."""
    numbers = sum(t.numel() for t in weights.values())
    positions = shape.block_size * max(shape.head_dim or 0, shape.n_embd // shape.n_head)
    for value, limit, what in ((shape.n_layer, max(256, len(weights)), "blocks"),
                               (positions, max(1 << 24, numbers), "numbers of positions"),
                               (shape.vocab_size or 0, max(1 << 20, numbers), "token ids")):
        if not 0 <= value <= limit:
            raise ValueError(f"a shape of {value:,} {what} for {len(weights):,} tensors of "
                             f"{numbers:,} numbers: its model_args or config are of another model")
