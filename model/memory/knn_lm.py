"""kNN-LM (arXiv:1911.00172), a baseline of model/memory for which nothing is trained.

A model's distribution is mixed with that of the tokens that followed the most similar states in a
stored text. Shapes: N stored tokens, M tokens of a batch, C channels.
"""

import torch

N_STORED = 1 << 17  # tokens, at most
N_NEIGHBOURS = 64
TEMPERATURES = 1.0, 4.0, 16.0  # of squared distances of states
SHARES = 0.1, 0.2, 0.3, 0.4, 0.5, 0.6  # of the neighbours in the distribution
ROWS = 128  # distances of as many tokens at once


@torch.no_grad()
def read_states(model, batches):
    """Yield (states after the final norm (B T, C), targets (B T,)) of each batch (x, y), (B, T)."""
    for x, y in batches:
        yield model.trunk(x).flatten(0, 1).float(), y.flatten()


@torch.no_grad()
def knn_losses(model, stored, batches):
    """Return the mean cross-entropy of kNN-LM, (temperatures, shares), for TEMPERATURES and SHARES.

    stored: (states (N, C), targets (N,)) of the text that is searched, as from read_states().
    batches: an iterable of (x, y), token ids and targets, (B, T) each.
    """
    keys, tokens = stored
    shares = torch.tensor(SHARES).view(1, -1, 1)
    losses = []
    for states, targets in read_states(model, batches):
        own = model.logits(states).log_softmax(-1).gather(1, targets[:, None])[:, 0].exp()  # (M,)
        found = torch.cat([neighbour_probability(*rows, keys, tokens) for rows in
                           zip(states.split(ROWS), targets.split(ROWS))], 1)  # (temperatures, M)
        losses.append(-((1 - shares) * own + shares * found[:, None]).log())
    return torch.cat(losses, 2).mean(2)


def neighbour_probability(states, targets, keys, tokens):
    """Return the neighbours' probability (temperatures, M) of targets (M,), for TEMPERATURES.

    states (M, C). keys (N, C), tokens (N,): the stored states, and the token after each.
    It is softmax(-squared distance / temperature) over the N_NEIGHBOURS nearest stored states (or
    all, if fewer), summed over those whose next token is the target.
    """
    distances, nearest = torch.cdist(states, keys).topk(min(N_NEIGHBOURS, len(keys)), largest=False)
    scores = -distances.square() / torch.tensor(TEMPERATURES).view(-1, 1, 1)
    return (scores.softmax(-1) * (tokens[nearest] == targets[:, None])).sum(-1)
