"""Computes with an exported folder as its user would: a program of its own, of transformers and PEFT alone.

`check` starts it by this file's path, whose folder Python does not search, with the name of a JSON file. Nothing of the
package is imported here, and the answer says so: what it computes owes nothing to the package's patches or adapters.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

OURS = ("prefix_train", "configs", "slurm", "preflight")

UNWRITTEN = 3
"""Exit status where the disk does not take what was computed."""


def load(task: dict[str, Any]) -> tuple[Any, list[str]]:
    """The model in float32, and what was said of tensors that found no place."""
    where, more = task["base"]
    own = AutoConfig.from_pretrained(where, local_files_only=True, **more)
    with_images = own.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto: Any = AutoModelForImageTextToText if with_images else AutoModelForCausalLM
    dtype = getattr(torch, task["dtype"])
    model, keys = auto.from_pretrained(where, dtype=dtype, local_files_only=True, output_loading_info=True, **more)
    said = [f"{kind}: {key}" for kind, found in sorted(keys.items()) for key in sorted(map(str, found))]
    if task["adapter"] is not None:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(model, task["adapter"])
        said += [text for one in told if "missing" in (text := str(one.message)) or "unexpected" in text]
    return model.float().eval(), said


@torch.no_grad()
def main(path: Path) -> None:
    """Read the task, compute, write `out` (logits of the asked rows of each example) and `answer` (JSON)."""
    task = json.loads(path.read_text())
    torch.set_num_threads(task["threads"])
    model, said = load(task)
    model.to(task["device"])
    inputs, logits = load_file(task["inputs"], device=task["device"]), {}
    for example in range(task["examples"]):
        given = {key.partition("/")[2]: value for key, value in inputs.items() if key.startswith(f"{example}/")}
        rows = given.pop("rows")
        logits[str(example)] = model(**given, use_cache=False).logits[0, rows].cpu().contiguous()
    answer: dict[str, Any] = {"said": said, "ours": [name for name in OURS if name in sys.modules]}
    if task["text"] is not None:
        tokenizer = AutoTokenizer.from_pretrained(task["base"][0], local_files_only=True)
        answer["tokens"] = tokenizer(task["text"], add_special_tokens=False)["input_ids"]
        answer["template"] = tokenizer.chat_template
    try:
        save_file(logits, task["out"])
        Path(task["answer"]).write_text(json.dumps(answer))
    except (SafetensorError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(UNWRITTEN)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
