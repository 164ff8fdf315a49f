"""Compare --model autoencoder with scikit-learn on synthetic brain data of known structure:

python -m tests.encoding [SET...] [--seeds 1 2 3] [--set KEY=VALUE...]

Twelve hidden signals change slowly in time (AR(1)). Three modalities are noisy mixtures of some of
them, the target is a mixture of all plus noise. Rows are split by runs: to train, for validation,
and a test part, which nothing sees before the end. Each model is judged by the mean correlation
over the targets on the test rows. The baselines are fitted on the training and the validation rows
together: RidgeCV with one penalty per target, without and with the 10 rows before each row as
additional features, and MLPRegressor(256).

In the set "subjects", each of four subjects has a mixture, and every fourth run. A model with one
head for all, and a model of each subject, are trained as well.
"""

import argparse
import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from data.prepare.features import prepare_features
from model.autoencoder.__main__ import evaluate_rows
from model.autoencoder.data import add_delays
from model.core.load import load_model
from train.config import load_config
from train.train import train

N_DELAYS = 10
ROW_SECONDS = 1.5
SETS = {  # rows per run, runs to train on and to validate, targets, noise, structure
    "linear": (100, 20, 80, 1.0, "linear"),
    "nonlinear": (100, 20, 80, 0.7, "nonlinear"),
    "delayed": (100, 20, 80, 1.0, "delayed"),
    "nonlinear and delayed": (100, 20, 80, 0.7, "nonlinear, delayed"),
    "500 targets": (100, 20, 500, 1.0, "linear"),
    "300 rows": (15, 20, 80, 1.0, "linear"),
    "300 rows, 500 targets": (15, 20, 500, 1.0, "linear"),
    "subjects": (100, 40, 80, 0.7, "nonlinear, subjects"),
    "missing": (100, 20, 80, 1.0, "missing"),
    "shuffled": (100, 20, 80, 1.0, "shuffled")}


def response():
    """Return the double-gamma response of the brain to a stimulus at the rows after it."""
    t = np.arange(0, 30, ROW_SECONDS)
    h = t ** 5 * np.exp(-t) / 120 - t ** 15 * np.exp(-t) / 1.307674368e12 / 6
    return h / np.linalg.norm(h)


def make_set(name, seed, n_test_runs=20):
    """Return ({modality: array}, target, runs, number of rows before the test part)."""
    length, n_runs, n_targets, noise, structure = SETS[name]
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((n_runs + n_test_runs, length, 12))
    for t in range(1, length):
        z[:, t] = 0.9 * z[:, t - 1] + np.sqrt(1 - 0.9 ** 2) * z[:, t]
    signals = z
    if "nonlinear" in structure:  # half of the variance: products of two signals, and |z|
        pairs = rng.permutation([(i, j) for i in range(12) for j in range(i)])[:12]
        products = np.stack([z[..., i] * z[..., j] for i, j in pairs], -1)
        signals = np.concatenate([z, products, np.abs(z)], -1)
        signals[..., 12:] -= signals[..., 12:].mean((0, 1))
        signals[..., 12:] /= signals[..., 12:].std((0, 1)) * np.sqrt(2)
    mixture = rng.standard_normal((signals.shape[-1], n_targets))
    clean = signals @ mixture
    for subject in range(1, 4) if "subjects" in structure else ():
        clean[subject::4] = signals[subject::4] @ rng.standard_normal(mixture.shape)
    if "delayed" in structure:
        clean = np.apply_along_axis(lambda c: np.convolve(c, response())[:length], 1, clean)
    clean = clean.reshape(-1, n_targets)
    target = clean / clean.std(0) + noise * rng.standard_normal(clean.shape)
    arrays = {}
    for modality, dims, part in (("video", 120, slice(0, 7)), ("audio", 40, slice(4, 9)),
                                 ("text", 80, slice(7, 12))):
        s = z[..., part].reshape(len(target), -1)
        x = s @ rng.standard_normal((s.shape[1], dims))
        arrays[modality] = (x + rng.standard_normal(x.shape)).astype("f4")
    if structure == "missing":
        arrays["audio"][rng.random(len(target)) < 0.3] = np.nan
    n = n_runs * length
    if structure == "shuffled":
        target[:n] = rng.permutation(target[:n])
    return arrays, target.astype("f4"), np.repeat(np.arange(n_runs + n_test_runs), length), n


def mean_correlation(p, y):
    p = p - p.mean(0)
    y = y - y.mean(0)
    return float(np.mean((p * y).sum(0) / np.sqrt((p ** 2).sum(0) * (y ** 2).sum(0))))


def design(arrays, runs, delays, n):
    """Return standardised features with those of the rows before, 0 where there are none."""
    x = np.concatenate(list(arrays.values()), 1).astype("f8")
    x = np.nan_to_num((x - np.nanmean(x[:n], 0)) / np.nanstd(x[:n], 0))
    parts = [x]
    for d in range(1, delays + 1):
        shifted = np.roll(x, d, 0)
        shifted[np.arange(len(x)) - d < 0] = 0
        shifted[runs != np.roll(runs, d)] = 0
        parts.append(shifted)
    return np.concatenate(parts, 1)


def baselines(arrays, y, runs, n):
    """Return {name: (correlation, seconds)} on the test part, of fits to the n rows before it."""
    from sklearn.linear_model import RidgeCV
    from sklearn.neural_network import MLPRegressor
    penalties = np.logspace(-1, 6, 15)
    fits = {"ridge": (0, RidgeCV(penalties, alpha_per_target=True)),
            "ridge with lags": (N_DELAYS, RidgeCV(penalties, alpha_per_target=True)),
            "MLP": (0, MLPRegressor(hidden_layer_sizes=256, early_stopping=True, max_iter=200,
                                    random_state=0))}
    out = {}
    for name, (delays, fit) in fits.items():
        x = design(arrays, runs, delays, n)
        start = time.perf_counter()
        prediction = fit.fit(x[:n], y[:n]).predict(x[n:])
        out[name] = mean_correlation(prediction, y[n:]), time.perf_counter() - start
    return out


def trained(folder, out, arrays, y, runs, n, changes, subjects=None, heads=True):
    """Return {name: (correlation, seconds)} on the test part, of a run of --model autoencoder and
    its linear path. subjects: of each row; the correlation is a mean over them. heads: one each."""
    start = time.perf_counter()
    prepare_features({k: a[:n] for k, a in arrays.items()}, y[:n], str(folder), 0.1, runs[:n],
                     subjects=subjects[:n] if subjects is not None and heads else None)
    config = load_config("train/configs/autoencoder.yaml", changes | dict(
        data_dir=str(folder), out_dir=str(out)))
    with contextlib.redirect_stdout(io.StringIO()):
        result = train(config)
    seconds = time.perf_counter() - start
    best = out / "ckpt_best.pt"
    model, _ = load_model(best if best.exists() else out / "ckpt.pt")
    test = [a[n:] for a in arrays.values()]
    if model.keys.delays:
        test = [add_delays(a, runs[n:], model.keys.delays) for a in test]
    test.append(y[n:])
    if "subjects" in model.spec:
        test.append(np.equal.outer(subjects[n:], model.spec["subjects"]).astype("f4"))
    groups = [slice(None)]
    if subjects is not None:
        groups = [subjects[n:] == s for s in np.unique(subjects)]
    numbers = [evaluate_rows(model, [a[rows] for a in test])[0] for rows in groups]
    print(f"  {result['iter_num']} steps", file=sys.stderr)
    r, ridge = (np.mean([m.get(k) or np.nan for m in numbers]) for k in ("correlation", "ridge"))
    return {"autoencoder": (r, seconds), "its linear path": (ridge, np.nan)}


def trained_without_heads(folder, arrays, y, runs, n, changes, subjects):
    """Return {name: (correlation, seconds)} of a model of all subjects with one head, and the mean
    of models of one subject each, as of trained()."""
    made = trained(folder / "1", folder / "2", arrays, y, runs, n, changes, subjects, heads=False)
    alone = []
    for s in np.unique(subjects):
        own = subjects == s
        alone.append(trained(folder / f"data {s}", folder / f"out {s}",
                             {k: a[own] for k, a in arrays.items()}, y[own], runs[own],
                             own[:n].sum(), changes))
    return {"one head": made["autoencoder"],
            **{f"a model each, {name}": tuple(np.mean([m[name] for m in alone], axis=0))
               for name in alone[0]}}


def main(argv=None):
    parser = argparse.ArgumentParser("python -m tests.encoding", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=list(SETS), help=f"of {', '.join(SETS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--no_baselines", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the run")
    args = parser.parse_args(argv)
    for name in args.sets:
        rows = {}
        for seed in args.seeds:
            data = make_set(name, seed)
            changes = dict(item.split("=", 1) for item in args.set) | dict(seed=seed)
            subjects = data[2] % 4 if "subjects" in SETS[name][-1] else None
            with tempfile.TemporaryDirectory() as folder:
                made = trained(Path(folder, "data"), Path(folder, "out"), *data, changes, subjects)
                if subjects is not None:
                    made |= trained_without_heads(Path(folder), *data, changes, subjects)
            made |= {} if args.no_baselines else baselines(*data)
            for row, values in made.items():
                rows.setdefault(row, []).append(values)
        for row, values in rows.items():
            r, seconds = zip(*values)
            print(f"{name:22} {row:31} {np.mean(r):.4f}  ({' '.join(f'{v:.4f}' for v in r)})  "
                  f"{np.mean(seconds):6.1f} s", flush=True)


if __name__ == "__main__":
    main()
