"""Evaluate a checkpoint with the lm-evaluation-harness.

    python -m model.eval.lm_eval --ckpt out/ckpt.pt --tasks lambada_openai,hellaswag --limit 100

The checkpoint is exported to a temporary Hugging Face folder (model/convert/), which the harness
evaluates by its model `hf`.
https://github.com/EleutherAI/lm-evaluation-harness
"""

import json
import os
import tempfile
from dataclasses import dataclass

from model.core.load import BACKBONE
from train.base.cli import command
from train.base.errors import CheckpointError, DataError, require
from train.base.fields import key
from train.base.files import write_text
from train.distributed import get_device


@dataclass
class HarnessOptions:
    """Evaluate a checkpoint with the lm-evaluation-harness (pip install lm-eval[hf])."""
    tasks: list[str] = key([], "names of tasks, separated by commas", required=True)
    ckpt: str = key("out/ckpt.pt", "checkpoint or Hugging Face folder", path=True)
    backbone: str | None = key(None, BACKBONE, path=True)
    num_fewshot: int | None = key(None, "examples before each question (default: the task's)", ge=0)
    limit: int | None = key(None, "evaluate at most N examples per task", ge=1)
    batch_size: int = key(8, "rows per batch", ge=1)
    device: str = key("auto", "auto, cpu, cuda or mps")
    include_path: str | None = key(None, "folder with more task files (.yaml)", metavar="FOLDER")
    apply_chat_template: bool = key(False, "ask in the chat format of the model")
    out: str | None = key(None, "also write all results to this file", metavar="FILE.json")
    log_samples: bool = key(False, "also write each question and answer to the --out file")


def evaluate(options):
    """Run the harness on options.tasks; print a table, and write options.out, if it is given.

    The file options.out is created first, so that an error of the file system is raised early.
    Raises UserError if the model cannot be exported, or if an option cannot be used.
    """
    require("lm_eval.models.huggingface", "model.eval.lm_eval", "lm-eval[hf]")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable, make_table
    from transformers import PreTrainedTokenizerFast
    o = options
    if o.log_samples and not o.out:
        raise DataError("--log_samples: needs --out FILE.json")
    manager = TaskManager(include_path=o.include_path)
    if unknown := set(o.tasks).difference(manager.all_tasks):
        raise DataError(f"--tasks: the harness has no {', '.join(unknown)}; see `lm-eval ls tasks`")
    if o.out:
        os.makedirs(os.path.dirname(o.out) or ".", exist_ok=True)
        open(o.out, "a").close()
    with tempfile.TemporaryDirectory() as folder:
        export(o, folder)
        # AutoTokenizer of transformers 5 would take any tokenizer of a Qwen2 for Qwen's.
        model = dict(pretrained=folder, dtype="float32",
                     tokenizer=PreTrainedTokenizerFast.from_pretrained(folder))
        results = simple_evaluate(
            "hf", model, o.tasks, num_fewshot=o.num_fewshot, batch_size=o.batch_size,
            device=str(get_device(o.device)), limit=o.limit,
            apply_chat_template=o.apply_chat_template, task_manager=manager)
    print(make_table(results))
    if o.out:
        names = ["results", "n-samples", *["samples"] * o.log_samples]
        text = json.dumps({name: results[name] for name in names}, indent=2,
                          default=handle_non_serializable)
        write_text(o.out, text)


def export(o, folder):
    """Write the model that o, a HarnessOptions, names to the Hugging Face folder `folder`."""
    from model.convert import export_folder, read_source
    from model.convert.foreign import read_model
    state = read_model(o.ckpt)
    try:
        source = read_source(state, o.ckpt, o.backbone, for_others=True)
        if source.tokenizer is None or source.tokenizer.eot_token is None:
            raise DataError(f"{o.ckpt}: the harness needs a tokenizer with an end of text")
        if o.apply_chat_template and not source.template:
            raise DataError(f"--apply_chat_template: {o.ckpt} is not a chat model")
        export_folder(source, folder, "float32")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; eval_tasks evaluates models that cannot be exported "
                              "(train/README.md)") from None


main = command(HarnessOptions, evaluate)
