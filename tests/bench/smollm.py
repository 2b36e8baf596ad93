"""A pretrained model on a real task: packs against the same examples alone, by held-out quality and by the clock.

SmolLM2-135M learns to judge biopsies under an instruction of at least `--prefix` tokens, the register and as many
solved cases of it as that takes. For each seed both sides start from the same adapters and see the same examples in the
same updates; `packs` computes the instruction once for all examples of an update, `alone` once for each. Both sides'
models are then asked the same held-out questions in the same way. What was measured is written after every side, so
that a run which is cut short leaves it.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from configs import compose, runfolder
from configs.schema import Config
from prefix_train import anatomy, biopsies, engines, gradients
from prefix_train import model as models
from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.data import load_examples
from prefix_train.dist import Ranks
from prefix_train.evaluate import example_losses
from prefix_train.feed import Feed
from prefix_train.heldout import Heldout
from prefix_train.model import Root
from prefix_train.plan import Cursor
from prefix_train.render import Renderer
from prefix_train.step import Stepper, learning_rate, update
from prefix_train.train import make_optimizer

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "smollm2-135m.yaml"
OUT = ROOT / "tests" / "bench" / "results" / "smollm.json"
SIDES = {"packs": "shared", "alone": "standalone"}
PER_EXAMPLE = 100
"""Most tokens that one example adds to a pack."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    asked = parse(arguments)
    began = time.monotonic()
    transformers.logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(asked, Path(name), device)
        found = bench.document() | {"before": bench.before(), "runs": []}
        print(
            f"{found['prefix']} + {asked.examples} x {found['continuation']:.0f} tokens; {found['before']}", flush=True
        )
        for seed in asked.seeds:
            for side in SIDES:
                found["runs"].append(bench.train(seed, side))
                found["seconds"] = time.monotonic() - began
                runfolder.write_json(asked.out, found)
                print(line(found["runs"][-1]), flush=True)
    print(summary(found))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=600, help="least tokens of the instruction")
    parser.add_argument("--examples", type=int, default=16, help="examples in an update, all in one pack")
    parser.add_argument("--updates", type=int, default=7)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--heldout", type=int, help="held-out examples; all 169 by default")
    parser.add_argument("--dtype", choices=models.DTYPES, help="float32 on a CPU, bfloat16 on a GPU by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="the GGUF file, where the package that carries it is not installed")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args(arguments)
    asked.dtype = asked.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    return asked


class Bench:
    """The pretrained model, the data written for its tokenizer, and what is asked of it."""

    def __init__(self, asked: argparse.Namespace, folder: Path, device: torch.device) -> None:
        self.asked, self.folder, self.ranks = asked, folder, Ranks(0, 1, device, None)
        self.model, self.processor = models.load(self.config(0, "packs").model)
        self.cases = cases_for(self.processor, asked.prefix)
        biopsies.write_biopsies(folder, self.cases)
        config = self.config(0, "packs")
        renderer = Renderer(self.processor, self.model.config)
        self.examples = load_examples(Path(config.data.train), renderer, config.pack.max_positions, "stop")
        heldout = Heldout.load(config, renderer, self.ranks)
        assert heldout is not None
        self.heldout = heldout

    def config(self, seed: int, side: str) -> Config:
        """The recipe with this bench's sizes."""
        asked = self.asked
        most = max(asked.prefix, 600) + PER_EXAMPLE * (asked.examples + 1)
        return compose.load(
            CONFIG,
            [
                *(f"seed={seed}", f"model.dtype={asked.dtype}", f"train.threads={asked.threads}"),
                *(f"pack.mode={SIDES[side]}", f"pack.max_positions={most}", "pack.packs_per_update=null"),
                *(f"pack.examples_per_update={asked.examples}", "train.epochs=null", f"train.updates={asked.updates}"),
                *(f"data.train={self.folder}/train.jsonl", f"data.heldout={self.folder}/heldout.jsonl"),
                *([] if asked.model is None else [f"model.path={asked.model}"]),
                *(f"evaluate.examples={asked.heldout or 'null'}", "slurm.tasks_per_node=1"),
            ],
        )

    def document(self) -> dict[str, Any]:
        """What is measured, and where."""
        pack = self.heldout.packs(0)[0]
        rest = [len(example.ids) - pack.lengths[0] for example in self.examples]
        wanted = [example.answer for example in self.heldout.examples]
        on_gpu = self.ranks.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
            "threads": None if on_gpu else torch.get_num_threads(),
            "torch": torch.__version__,
            "dtype": self.asked.dtype,
            "prefix": pack.lengths[0],
            "cases": self.cases,
            "continuation": statistics.fmean(rest),
            "examples": self.asked.examples,
            "updates": self.asked.updates,
            "heldout_examples": len(wanted),
            "chance": max(wanted.count(answer) for answer in set(wanted)) / len(wanted),
        }

    def before(self) -> dict[str, float]:
        """Quality of the pretrained model: fresh adapters change nothing."""
        return quality(self.root(self.config(0, "packs")), self.heldout, self.ranks.device)

    def root(self, config: Config) -> Root:
        """The pretrained model again, with fresh adapters, on the device."""
        prepared = models.prepare(copy.deepcopy(self.model), config)
        largest = Feed(config, self.examples, self.ranks).largest_pack()
        return engines.make_root(prepared, config, self.ranks, False, largest)[0]

    def train(self, seed: int, side: str) -> dict[str, Any]:
        """All updates of one side, and what came of them. Seconds are those of the updates alone."""
        config = self.config(seed, side)
        train, feed, root = config.train, Feed(config, self.examples, self.ranks), self.root(config)
        parameters = anatomy.trainable(root.model)
        optimizer = make_optimizer(parameters, config)
        coverage = gradients.Coverage(list(parameters), frozenset(), train.warmup_updates)
        stepper = Stepper(root, parameters, optimizer, self.ranks, coverage, seed, train.clip_norm, feed.name)
        results, seconds = [], []
        for ready in feed.walk(Cursor()):
            number = ready.step.cursor.number
            lr = learning_rate(number, train.updates or 0, train.lr, train.warmup_updates, train.schedule)
            began = self.clock()
            results.append(update(stepper, number + 1, lr, ready.batches))
            seconds.append(self.clock() - began)
        return {
            "seed": seed,
            "side": side,
            **quality(root, self.heldout, self.ranks.device),
            "seconds": sum(seconds),
            "median_s": statistics.median(seconds),
            "positions": sum(result.positions for result in results),
            "logical_tokens": sum(result.logical for result in results),
            "losses": [result.loss for result in results],
        }

    def clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def cases_for(tokenizer: Any, tokens: int) -> int:
    """Fewest solved cases with which the instruction has so many tokens."""
    cases = 0
    while len(tokenizer(biopsies.instruction(cases))["input_ids"]) < tokens:
        cases += 1
    return cases


@torch.no_grad()
def quality(root: Root, heldout: Heldout, device: torch.device) -> dict[str, float]:
    """Share of `heldout` that is answered exactly, greedily, and their mean loss.

    Greedy decoding gives the expected answer, end-of-turn token included, just where each of its tokens is the
    likeliest one after those before it: one pass over the expected answers tells this for all of them.
    """
    root.eval()
    losses, exact = {}, []
    counts = [int(example.target.sum()) for example in heldout.examples]
    for pack in heldout.packs(0):
        batch = collate(pack, heldout.examples, entry_weights("example", counts)).to(device)
        with root.copies or nullcontext():
            logits = root.model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                layout=batch.layout,
                use_cache=False,
                logits_to_keep=batch.targets.rows,
            ).logits[0]
        losses |= example_losses(functional.cross_entropy(logits.float(), batch.targets.ids, reduction="none"), batch)
        exact += exact_answers(logits.argmax(-1), batch)
    root.train()
    return {"exact": statistics.fmean(exact), "loss": statistics.fmean(losses.values())}


def exact_answers(likeliest: Tensor, batch: Batch) -> list[bool]:
    """For each member of the pack: is every token of its answer the likeliest? likeliest: [M] token ids."""
    targets = batch.targets
    right = (likeliest == targets.ids).float()[targets.entry_target]
    least = right.new_ones(len(batch.members)).scatter_reduce(0, targets.entry_example, right, "amin")
    return [bool(one) for one in least.tolist()]


def line(run: dict[str, Any]) -> str:
    """One side of one seed, for a person."""
    return (
        f"seed {run['seed']}, {run['side']}: {run['exact']:.1%} exact, held-out loss {run['loss']:.4f}; "
        f"{len(run['losses'])} updates in {run['seconds']:.1f} s ({run['median_s']:.2f} s each), "
        f"{run['positions']:,} positions"
    )


def summary(found: dict[str, Any]) -> str:
    """Both sides over all seeds, for a person."""
    sides = {side: [run for run in found["runs"] if run["side"] == side] for side in SIDES}
    differ = max(
        abs(one - other)
        for packs, alone in zip(*sides.values(), strict=True)
        for one, other in zip(packs["losses"], alone["losses"], strict=True)
    )
    faster = sum(run["seconds"] for run in sides["alone"]) / sum(run["seconds"] for run in sides["packs"])
    exact = " and ".join(f"{side} {statistics.fmean(run['exact'] for run in runs):.1%}" for side, runs in sides.items())
    return (
        f"exact: {exact} (always the commoner answer: {found['chance']:.0%}); alone took {faster:.1f} times as long; "
        f"losses of one update differ by at most {differ:.1e}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
