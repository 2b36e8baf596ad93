"""This node among others: what its name resolves to, and the interfaces that ranks will talk through."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

import psutil

from preflight.setting import Setting, sys_folder
from preflight.states import Finding

CHOSEN = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Variables that name interfaces."""

LOOPBACK = "lo"


def check_name(setting: Setting) -> Finding:
    """The name that other nodes will use must resolve; whether to an address that they reach is for the judge."""
    name = socket.gethostname()
    try:
        addresses = _addresses(name)
    except socket.gaierror as error:
        return Finding("host.name", "fail", f"{name} does not resolve: {error.strerror}", "add it to DNS or /etc/hosts")
    loopback = all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses)
    facts = {"addresses": addresses, "loopback": loopback, "interface": _interface_of(addresses)}
    return Finding("host.name", "pass", f"{name} is {', '.join(addresses)}", "", facts)


def check_network(setting: Setting) -> Finding:
    """The interface of the node's address, those that variables name, and InfiniBand's ports."""
    interfaces = psutil.net_if_stats()
    up = {name for name, interface in interfaces.items() if interface.isup}
    for variable in CHOSEN:
        wanted = os.environ.get(variable, "")
        if wanted and not any(_chosen(name, wanted) for name in up):
            found = f"{variable} is {wanted!r}, but the interfaces of this node that are up are {', '.join(sorted(up))}"
            return Finding("host.network", "fail", found, f"set {variable} to one that every node has")
    own = _own_interface()
    facts: dict[str, Any] = {"interface": own, "infiniband": infiniband(sys_folder() / "class" / "infiniband")}
    if own in interfaces and own != LOOPBACK:
        facts |= {"mtu": interfaces[own].mtu, "speed_mbit": interfaces[own].speed}
    ports = ", ".join(f"{port} {state}" for port, state in facts["infiniband"].items()) or "no InfiniBand"
    return Finding("host.network", "pass", f"{own or 'no interface of its address'}, {ports}", "", facts)


def infiniband(folder: Path) -> dict[str, str]:
    """`device/port` -> state and rate as the kernel says them, for instance `ACTIVE 400 Gb/sec (4X NDR)`."""
    found = {}
    for port in sorted(folder.glob("*/ports/*")):
        state = (port / "state").read_text().strip().rpartition(": ")[2]
        found[f"{port.parts[-3]}/{port.name}"] = f"{state} {(port / 'rate').read_text().strip()}"
    return found


def _chosen(name: str, wanted: str) -> bool:
    """Whether a variable of CHOSEN takes the interface `name`, by NCCL's rules: `^a,b` all but, `=a` exactly, else
    names that begin so (NCCL's documentation, NCCL_SOCKET_IFNAME)."""
    if wanted.startswith("^"):
        return not any(name.startswith(start) for start in wanted[1:].lstrip("=").split(","))
    if wanted.startswith("="):
        return name in wanted[1:].split(",")
    return any(name.startswith(start) for start in wanted.split(","))


def _addresses(name: str) -> list[str]:
    return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})


def _own_interface() -> str | None:
    """The interface that has the address of the node's name; LOOPBACK says nothing of how others reach the node."""
    try:
        addresses = _addresses(socket.gethostname())
    except socket.gaierror:  # `check_name` says so
        return None
    return _interface_of(addresses)


def _interface_of(addresses: list[str]) -> str | None:
    """The first interface that has one of the addresses."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address in addresses for entry in entries):
            return str(name)
    return None
