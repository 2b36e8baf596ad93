"""Which environment variables a report may show, and what must never be in one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ALLOWED = """
    CUDA_VISIBLE_DEVICES CUDA_HOME CUDA_PATH CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_CACHE_PATH
    CUDA_DEVICE_MAX_CONNECTIONS
    NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_DISABLE NCCL_IB_HCA NCCL_IB_GID_INDEX NCCL_NET NCCL_NET_PLUGIN
    NCCL_P2P_DISABLE
    NCCL_P2P_LEVEL NCCL_SHM_DISABLE NCCL_NVLS_ENABLE NCCL_ALGO NCCL_PROTO NCCL_TUNER_PLUGIN NCCL_CROSS_NIC
    NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_BUFFSIZE NCCL_CUMEM_ENABLE NCCL_NET_GDR_LEVEL FI_PROVIDER
    GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME
    TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT TORCH_DISTRIBUTED_DEBUG TORCH_SYMM_MEM_DISABLE_MULTICAST
    TORCHDYNAMO_DISABLE TORCHINDUCTOR_CACHE_DIR PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF
    TRITON_CACHE_DIR TRITON_HOME TILELANG_CACHE_DIR FLA_CACHE_MODE FLA_CONFIG_DIR FLA_GPU_NAME FLA_TILELANG
    FLA_CACHE_RESULTS FLA_DISABLE_BACKEND_DISPATCH
    OMP_NUM_THREADS MKL_NUM_THREADS KMP_AFFINITY LD_PRELOAD LD_LIBRARY_PATH
    PYTHONPATH PYTHONHOME PYTHONNOUSERSITE PYTHONSAFEPATH PYTHONHASHSEED PYTHONOPTIMIZE TMPDIR LANG LC_ALL
    HF_HUB_OFFLINE TRANSFORMERS_OFFLINE TOKENIZERS_PARALLELISM
"""
ALLOWED = frozenset(_ALLOWED.split())
"""Names whose values go into a report as they are, because they change what a rank computes or whom it talks to."""

OF_ONE_NODE = (
    "TMPDIR",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "CUDA_CACHE_PATH",
)
"""Of these, the ones that may differ between healthy nodes."""

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|_KEY$|_PAT$|AUTH|COOKIE", re.I)
_IN_URL = re.compile(r"(?<=://)[^/\s@\"']+@")
_WELL_KNOWN = re.compile(
    r"\b(?:hf_|gh[opsu]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|wandb_)[A-Za-z0-9_-]{12,}|\bBearer\s+\S+"
)
HIDDEN = "[hidden]"


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environment` that a report may show."""
    return {name: environment[name] for name in sorted(ALLOWED & environment.keys())}


def without_secrets(document: Any, environment: Mapping[str, str]) -> Any:
    """`document`, of built-in types, with every secret blanked that found its way into a text.

    A secret is the value of a variable that is named like one, what stands before the @ of a URL, and what has the
    form of a well-known service's token.
    """
    secrets = {value for name, value in environment.items() if name not in ALLOWED and _SECRET_NAME.search(name)}
    known = sorted((value for value in secrets if len(value) >= 6), key=len, reverse=True)

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            for secret in known:
                value = value.replace(secret, HIDDEN)
            return _WELL_KNOWN.sub(HIDDEN, _IN_URL.sub(f"{HIDDEN}@", value))
        if isinstance(value, dict):
            return {clean(name): clean(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(item) for item in value]
        return value

    return clean(document)
