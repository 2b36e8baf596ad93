"""What NVIDIA's driver says of this machine's GPUs, asked through `nvidia-smi`. No torch."""

from __future__ import annotations

import shutil
import subprocess

SMI = "nvidia-smi"
DEADLINE_S = 20.0
"""A healthy driver answers in a second or two, without persistence mode in up to ten."""


def ask(field: str) -> list[str]:
    """A field of `--query-gpu`, one text for each GPU; nothing where there is no GPU, or where its driver does not
    answer."""
    if shutil.which(SMI) is None:
        return []
    question = [SMI, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return []
    return [line.strip() for line in answer.stdout.splitlines()] if answer.returncode == 0 else []
