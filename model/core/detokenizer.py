"""Incremental detokenization: text from tokens during generation."""

import codecs

from train.base.errors import printable


class Detokenizer:
    """Incremental conversion of tokens to text; `stopped` is true once a stop string was found.

    Held back until later tokens complete or exclude them: an incomplete UTF-8 character, a carriage
    return, which may begin a line end, and text that may begin a stop string.
    """

    def __init__(self, tokenizer, stop_strings=()):
        self.tokenizer = tokenizer
        self.stop_strings = stop_strings
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.pending = ""
        self.stopped = False

    def add(self, token=None, last=False):
        """Add a token id (`None`: no new token) and return the text that is now complete, or "".

        last: return held-back text too; an incomplete character becomes U+FFFD.
        If a stop string is found, return the text before it; do not call add() afterwards.
        """
        data = b"" if token is None else self.tokenizer.bytes_of(token)
        self.pending += self.decoder.decode(data, last)
        positions = [self.pending.find(stop) for stop in self.stop_strings if stop in self.pending]
        if positions:
            self.stopped = True
            return self.pending[:min(positions)]
        n_held = 0  # characters that may begin a stop string or a line end
        if not last:
            n_held = max((n for stop in (*self.stop_strings, "\r\n") for n in range(1, len(stop))
                          if self.pending.endswith(stop[:n])), default=0)
        end = len(self.pending) - n_held
        text, self.pending = self.pending[:end], self.pending[end:]
        return text


class TextStreamer:
    """Callback on_token of generate(): prints row 0; held-back text at the end is lost."""

    def __init__(self, tokenizer, stop_tokens):
        self.detokenizer = Detokenizer(tokenizer)
        self.stop_tokens = stop_tokens

    def __call__(self, tokens):
        token = int(tokens[0])
        if token not in self.stop_tokens and (text := self.detokenizer.add(token)):
            print(printable(text), end="", flush=True)
