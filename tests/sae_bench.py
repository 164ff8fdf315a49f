"""SynthSAEBench (arXiv:2602.14687) for --model sae: activations with known features, and an
evaluation.

    python -m tests.sae_bench model out/synth                       # the features, once
    python -m tests.sae_bench data out/synth --samples 1064960      # activations to train on
    python run_train.py --config train/configs/sae_bench.yaml
    python -m model.sae --ckpt out/sae_bench/ckpt.pt --to out/lens
    python -m tests.sae_bench judge out/synth --sae out/lens        # by sae-lens: F1, L0

The features are generated from the configuration of SynthSAEBench-16k, version 2, without a
download. They are not those of the published model, which were sampled on a GPU, but have the same
statistics.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.format import open_memmap
from sae_lens import SAE
from sae_lens.synthetic import (
    FeatureDictionary,
    FoldedNormalMagnitudeConfig,
    HierarchyConfig,
    LinearMagnitudeConfig,
    LowRankCorrelationConfig,
    SyntheticModel,
    SyntheticModelConfig,
    ZipfianFiringProbabilityConfig,
    eval_sae_on_synthetic_data,
)

WINDOW = 1024  # activations that share k features each, as in the benchmark's batches


def benchmark(n_features=16384, hidden_dim=768, orthogonal_steps=100, roots=128):
    """Return the SyntheticModel (known features, from which activations are sampled) of
    SynthSAEBench-16k; with other arguments a smaller one of the same kind."""
    config = SyntheticModelConfig(
        num_features=n_features, hidden_dim=hidden_dim, seed=42, bias=0.5,
        firing_probability=ZipfianFiringProbabilityConfig(exponent=0.5, max_prob=0.4,
                                                          min_prob=5e-4),
        hierarchy=HierarchyConfig(
            total_root_nodes=roots, branching_factor=4, max_depth=3,
            mutually_exclusive_portion=1.0, mutually_exclusive_min_depth=0,
            compensate_probabilities=True, scale_children_by_parent=True),
        correlation=LowRankCorrelationConfig(rank=25, correlation_scale=0.1),
        mean_firing_magnitudes=LinearMagnitudeConfig(start=5.0, end=4.0),
        std_firing_magnitudes=FoldedNormalMagnitudeConfig(mean=0.5, std=0.5))

    def orthogonalize(features):
        vectors = features.feature_vectors
        vectors.data = orthogonalize_vectors(vectors.detach(), orthogonal_steps, lr=3e-4)
    return SyntheticModel(config, FeatureDictionary(n_features, hidden_dim, config.bias,
                                                    orthogonalize, seed=config.seed))


def orthogonalize_vectors(vectors, n_steps, lr):
    """Return what sae-lens's orthogonalize_embeddings returns for `vectors` (n, C), of unit length:
    n_steps of Adam on the sum of squared products of different vectors and n times that of (squared
    length - 1). The gradient needs products (C, C) instead of (n, n): a minute instead of hours."""
    vectors = vectors.clone().requires_grad_()
    optimizer = torch.optim.Adam([vectors], lr=lr)
    for _ in range(n_steps):
        with torch.no_grad():
            squares = vectors.square().sum(1, keepdim=True)  # (n, 1)
            vectors.grad = 4 * (vectors @ (vectors.T @ vectors) - squares * vectors
                                + len(vectors) * (squares - 1) * vectors)
        optimizer.step()
    return F.normalize(vectors.detach())


def write_activations(model, folder, samples, val_samples, seed):
    """Sample activations from `model`, a SyntheticModel, and write {train,val}_activations.npy to
    `folder`, float32 (windows, WINDOW, C). samples, val_samples: number of activations in each."""
    torch.manual_seed(seed)
    for split, count in (("val", val_samples), ("train", samples)):
        start = time.time()
        windows = open_memmap(folder / f"{split}_activations.npy", "w+", np.float32,
                              (count // WINDOW, WINDOW, model.cfg.hidden_dim))
        for window in windows:
            window[:] = model.sample(WINDOW).numpy()
        print(f"{split}: {windows.shape}, {time.time() - start:.0f} s")


def judge(model, sae_folder, samples, seed):
    """Return {name: value}: sae-lens's metrics (F1, L0, ...) of the exported autoencoder in
    sae_folder on `samples` new activations of `model`, a SyntheticModel."""
    torch.manual_seed(seed)
    result = eval_sae_on_synthetic_data(SAE.load_from_disk(sae_folder), model.feature_dict,
                                        model.activation_generator, samples, WINDOW)
    return dict(f1=result.classification.f1_score, l0=result.sae_l0, mcc=result.mcc,
                uniqueness=result.uniqueness, explained_variance=result.explained_variance,
                dead=result.dead_latents, true_l0=result.true_l0)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["model", "data", "judge"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sae", help="judge: folder that model.sae --to wrote")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--val_samples", type=int, default=16 * WINDOW)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="512 features in 64 dimensions")
    args = parser.parse_args(argv)
    if args.command == "model":
        benchmark(*(512, 64, 10, 8) if args.small else ()).save(args.folder)
        return
    model = SyntheticModel.load_from_disk(args.folder)
    if args.command == "data":
        write_activations(model, args.folder, args.samples, args.val_samples, args.seed)
    else:
        for name, value in judge(model, args.sae, args.samples, args.seed).items():
            print(f"{name:20} {value:.4f}")


if __name__ == "__main__":
    main()
