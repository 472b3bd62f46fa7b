"""Hosts that are network namespaces of this machine: each has its name, its address and a link to one switch, whose
bandwidth can be limited and which can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

NETWORK, PORT = "10.77.0", "29500"
BURST = "32k"
"""What may pass at once: little beside any message that is timed."""
REMOVE = 'for name; do ip netns pids "$name" | xargs -r kill -9; ip netns delete "$name"; done'
REAPER = f'while kill -0 "$0"; do sleep 1; done 2>&-; {REMOVE}'
"""Shell programs: remove namespaces with what runs in them, at once and after the process of that number has ended."""


@dataclass(frozen=True)
class Host:
    """number: from 1 on; namespace: its network's name on this machine."""

    number: int
    namespace: str
    switch: str

    @property
    def name(self) -> str:
        return f"host{self.number}"

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    def command(self, *words: str) -> list[str]:
        """That runs `words` there."""
        rename = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name)
        return ["ip", "netns", "exec", self.namespace, *rename, *words]

    def limit(self, mbit: float) -> None:
        """The bandwidth of its link, in each direction."""
        _limit(self.namespace, "eth0", mbit)
        _limit(self.switch, f"port{self.number}", mbit)

    def cut(self) -> None:
        _do("ip", "-n", self.switch, "link", "set", f"port{self.number}", "down")

    def mend(self) -> None:
        _do("ip", "-n", self.switch, "link", "set", f"port{self.number}", "up")


def need_hosts() -> None:
    """Skip the test where there can be no namespaces, or fail where nothing may be skipped (NO_SKIPS)."""
    why = None
    missing = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
    if missing:
        why = f"{', '.join(missing)} not installed: apt-get install iproute2 util-linux"
    elif os.geteuid() != 0:
        why = "network namespaces need root"
    else:
        name = f"trigrid-{os.getpid()}-try"
        tried = subprocess.run(("ip", "netns", "add", name), capture_output=True, text=True)
        if tried.returncode:
            why = f"network namespaces cannot be made here: {tried.stderr.strip()}"
        else:
            _do("ip", "netns", "delete", name)
    if why is None:
        return
    if os.environ.get("NO_SKIPS"):
        pytest.fail(why)
    pytest.skip(why)


@contextmanager
def hosts_of(count: int) -> Iterator[list[Host]]:
    """So many hosts behind one switch, while the body of the `with` runs."""
    prefix = f"trigrid-{os.getpid()}"
    switch = f"{prefix}-switch"
    hosts = [Host(number, f"{prefix}-{number}", switch) for number in range(1, count + 1)]
    names = (switch, *(host.namespace for host in hosts))
    # Also where these tests are killed outright.
    reaper = subprocess.Popen(("sh", "-c", REAPER, str(os.getpid()), *names), start_new_session=True)
    try:
        _do("ip", "netns", "add", switch)
        _do("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "br0", "up")
        for host in hosts:
            port = f"port{host.number}"
            _do("ip", "netns", "add", host.namespace)
            _do(*f"ip -n {switch} link add {port} type veth peer name eth0 netns {host.namespace}".split())
            _do("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _do("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _do("ip", "-n", host.namespace, "link", "set", device, "up")
        yield hosts
    finally:
        reaper.kill()
        reaper.wait()
        subprocess.run(("sh", "-c", REMOVE, "remove", *names), capture_output=True)


@contextmanager
def far(hosts: Sequence[Host], mbit: float) -> Iterator[None]:
    """`hosts` are behind a switch of their own, joined to the first one by a link of that bandwidth, while the body of
    the `with` runs."""
    switch = hosts[0].switch
    _do(*f"ip -n {switch} link add br1 type bridge".split())
    _do(*f"ip -n {switch} link set br1 up".split())
    _do(*f"ip -n {switch} link add up0 type veth peer name up1".split())
    try:
        for number in range(2):
            _do(*f"ip -n {switch} link set up{number} master br{number} up".split())
            _limit(switch, f"up{number}", mbit)
        for host in hosts:
            _do(*f"ip -n {switch} link set port{host.number} master br1".split())
        yield
    finally:
        for host in hosts:
            _do(*f"ip -n {switch} link set port{host.number} master br0".split())
        for device in ("up0", "br1"):
            _do(*f"ip -n {switch} link delete {device}".split())


def _limit(namespace: str, device: str, mbit: float) -> None:
    shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", "200ms")
    _do("tc", "-n", namespace, "qdisc", "replace", "dev", device, *shape)


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def torchrun(host: Host, hosts: Sequence[Host], ranks: int, *words: object, **env: str) -> subprocess.Popen[str]:
    """`trigrid WORDS` as so many ranks of `host`, one of `hosts`, under torchrun."""
    meet = (f"--nnodes={len(hosts)}", f"--node-rank={host.number - 1}", f"--nproc-per-node={ranks}")
    meet += (f"--master-addr={hosts[0].address}", f"--master-port={PORT}")
    return _start(host, ("torch.distributed.run", *meet, "-m", "trigrid"), words, env)


def as_rank(host: Host, hosts: Sequence[Host], *words: object, **env: str) -> subprocess.Popen[str]:
    """`trigrid WORDS` as the only rank of `host`."""
    world, rank = str(len(hosts)), str(host.number - 1)
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": PORT, "GROUP_WORLD_SIZE": world}
    return _start(host, ("trigrid",), words, place | env)


def _start(host: Host, module: Sequence[str], words: Sequence[object], env: dict[str, str]) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(
        host.command(sys.executable, "-m", *module, *map(str, words)),
        env={**clean, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[tuple[int, str, str]]:
    """Exit code, standard output and error of each; those that do not end in time are killed."""
    try:
        told = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, out, err) for process, (out, err) in zip(processes, told, strict=True)]
