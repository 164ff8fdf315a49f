"""Train a chain of models on the same data, each also on the predictions of earlier ones:

    python -m train.tools.chain --config FILE.yaml --models 8

The first model is a run of the configuration. The next ones have other seeds, and learn from the
data and from the average distribution of all earlier models (model/distill.py). The last run, the
student, distils all of them into one model. The table shows the loss of each model and of the
ensemble of all earlier models. A run is a process with a folder in out/chain; the same command
resumes, and repeats crashed runs.
"""

from dataclasses import dataclass

from train.base.cli import command, format_table
from train.base.errors import UserError, echo
from train.base.fields import key
from train.config import load_argv
from train.options.loss_svg import curve, read_metrics
from train.tools.child_runs import ChildRun, train_all


@dataclass
class ChainOptions:
    """Train a chain of models on the same data, each also on the predictions of earlier ones."""
    models: int = key(4, "models of the ensemble, besides the student", ge=2, le=8)
    weight: float = key(0.5, "weight of the earlier models in the loss", ge=0, le=1)
    out: str = key("out/chain", "folder of the runs", aliases="out_dir", path=True)


def train_chain(options, arguments):
    """Train the models of the chain one after the other, then the student, and print a table.

    Each one learns from the data and from all earlier ones together, except those that crashed.
    arguments: for run_train.py. Return the exit code: 1 if a run has no result, otherwise 0. Raises
    UserError if the model type is not gpt, or if the configuration has no evaluations.
    """
    config = load_argv(arguments)  # of run_train.py
    if config.model != "gpt":
        raise UserError("needs model: gpt")
    runs = []
    for i in range(options.models + 1):
        name = f"model_{i + 1}" if i < options.models else "student"
        own = [*arguments, f"--seed={config.seed + i}"]
        teachers = [str(run.folder / "ckpt.pt") for run in runs if run.value is not None]
        if teachers:
            own += ["--model=distill", f"--teacher={','.join(teachers)}",
                    f"--distill_weight={options.weight}"]
        runs.append(ChildRun(name, own, options.out))
        train_all(runs[-1:], "val_loss", options.out, jobs=1)
    header = ("run", "seconds", "val_loss", "ensemble of the earlier runs")
    echo(format_table([header, *map(table_row, runs)]))
    return int(any(run.value is None for run in runs))


def table_row(child):
    """Return texts (name, seconds, loss, ensemble loss of earlier runs); "-" for a missing loss."""
    losses = curve(read_metrics(child.folder / "metrics.jsonl"), "val_teacher_loss")
    loss = "-" if child.value is None else f"{child.value:.4f}"
    return child.name, f"{child.seconds:.0f}", loss, f"{losses[-1][1]:.4f}" if losses else "-"


main = command(ChainOptions, train_chain, load=list, interrupt_message="the same command resumes")
