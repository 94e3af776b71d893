"""Two "hosts" on one machine: network namespaces joined by a virtual cable, one rank in each, started by torchrun."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from steelyard.record.read import read_folder
from tests.train.conftest import corpus, t1  # noqa: F401  # fixtures
from tests.train.running import losses, train

HOSTS = {"steelyard-a": "10.211.77.1", "steelyard-b": "10.211.77.2"}


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """The two namespaces with a cable between them, gone afterwards."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the `ip` command")
    try:
        for name in HOSTS:
            ip("netns", "add", name)
        ip("link", "add", "steel0", "netns", "steelyard-a", "type", "veth", "peer", "steel0", "netns", "steelyard-b")
        for name, address in HOSTS.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "steel0")
            ip("-n", name, "link", "set", "steel0", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as failure:
        _remove()
        pytest.skip(f"this machine makes no network namespaces: {failure.stderr.strip()}")
    yield list(HOSTS)
    _remove()


def _remove():
    for name in HOSTS:
        ip("netns", "del", name, check=False)


def start(host, rank, path, *overrides):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank),
                "--nproc-per-node", "1", "--master-addr", HOSTS["steelyard-a"], "--master-port", "29511",
                "-m", "steelyard.cli.main", "train", str(path), *overrides]  # fmt: skip
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "steel0", "OMP_NUM_THREADS": "1"}
    command = ["ip", "netns", "exec", host, *launcher]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), ("parallel.tensor=2",), ("parallel.pipeline=2",)], ids=["dp2", "tp2", "pp2"])
def test_two_hosts_give_the_losses_of_one(hosts, pools, t1, tmp_path, layout):  # noqa: F811
    _, one = train(pools(2), t1, *layout, folder=tmp_path / "one")
    processes = [start(host, rank, t1, *layout, f"record.folder={tmp_path}/two") for rank, host in enumerate(hosts)]
    deadline = time.monotonic() + 120
    outputs = [process.communicate(timeout=max(1, deadline - time.monotonic()))[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert losses(read_folder(tmp_path / "two")) == losses(one)
