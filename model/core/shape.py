"""Checks of a GPTConfig that was read from a file, before the model is built."""

from dataclasses import fields

from train.base.fields import parse_value


def check_shape(shape, weights):
    """Raise ValueError if a GPTConfig has an invalid field or is too large, see check_size()."""
    for field in fields(shape):
        check_value(field, getattr(shape, field.name), field.name)
    check_size(shape, weights)


def check_value(field, value, name):
    """Return `value` in the type of a dataclass `field`; ValueError, with `name`, if invalid."""
    try:
        return parse_value(field, value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_size(shape, weights):
    """Raise ValueError if a GPTConfig or TrainConfig is much too large for tensors `weights`."""
    numbers = sum(t.numel() for t in weights.values())
    positions = shape.block_size * max(shape.head_dim or 0, shape.n_embd // shape.n_head)
    for value, limit, what in ((shape.n_layer, max(256, len(weights)), "blocks"),
                               (positions, max(1 << 24, numbers), "numbers of positions"),
                               (shape.vocab_size or 0, max(1 << 20, numbers), "token ids")):
        if not 0 <= value <= limit:
            raise ValueError(f"a shape of {value:,} {what} for {len(weights):,} tensors of "
                             f"{numbers:,} numbers: its model_args or config are of another model")
