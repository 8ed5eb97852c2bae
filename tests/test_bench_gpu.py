"""The benchmark on machines with a GPU, none of which is here: fakes stand for them."""

import os

import pytest
import torch

from bench import commands, nvidia
from bench.__main__ import main

DRIVERS = {  # by the driver: the index that it works with, "" for none
    "470.82.01": "",
    "525.60.13": "cu126",
    "535.183.01": "cu126",
    "560.35.03": "cu126",
    "570.86.15": "cu128",
    "580.65.06": "cu130",
    "610.10": "cu130",
}
MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs)\n"


class Fake:
    """What tells of a GPU: nvidia-smi, the folder of the driver in /proc, a node in /dev."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.patch = folder, monkeypatch
        monkeypatch.setattr(nvidia, "PROC", folder / "proc")
        monkeypatch.setattr(nvidia, "NODE", folder / "nvidia0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        self.torch("2.13.0+cpu", None)

    def torch(self, version, cuda, says=""):
        def init():
            raise RuntimeError(says)

        self.patch.setattr(torch, "__version__", version)
        self.patch.setattr(torch.version, "cuda", cuda)
        self.patch.setattr(torch.cuda, "init", init)

    def smi(self, says, status=0):
        programs = self.folder / "bin"
        programs.mkdir()
        (programs / "nvidia-smi").write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
        (programs / "nvidia-smi").chmod(0o755)
        self.patch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")

    def proc(self, driver, model="NVIDIA A100-SXM4-40GB"):
        card = self.folder / "proc" / "gpus" / "0000:01:00.0"
        card.mkdir(parents=True)
        (card / "information").write_text(f"Model: \t\t {model}\nIRQ:   1\n")
        (self.folder / "proc" / "version").write_text(MODULE.format(driver))

    def node(self):
        (self.folder / "nvidia0").write_text("")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return Fake(tmp_path, monkeypatch)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("by", ["smi", "proc"])
def test_the_index_is_that_of_the_driver(by, driver, fake):
    fake.smi(f"NVIDIA H100, {driver}") if by == "smi" else fake.proc(driver)
    said = nvidia.unusable()
    assert said.startswith("got torch 2.13.0+cpu, expected one that can use the GPU")
    assert f"driver {driver}): it is built for CPUs alone; " in said
    assert ("NVIDIA H100" if by == "smi" else "NVIDIA A100-SXM4-40GB") in said
    if DRIVERS[driver]:
        assert said.partition("--index-url ")[2].startswith(f"{nvidia.URL}{DRIVERS[driver]}")
    else:
        assert "update the driver to 525 or newer" in said


def test_a_cuda_newer_than_the_driver_is_told(fake):
    fake.smi("NVIDIA H100 80GB HBM3, 550.54.15")
    fake.torch("2.13.0+cu130", "13.0")
    said = nvidia.unusable()
    assert "built for CUDA 13.0; install a build for that driver" in said and "cu126" in said


def test_what_torch_says_is_told_where_the_driver_is_new_enough(fake):
    fake.smi("NVIDIA H100 80GB HBM3, 580.65.06")
    fake.torch("2.13.0+cu130", "13.0", "Error 802: system not yet initialized\nmore")
    said = nvidia.unusable()
    assert "and says: Error 802: system not yet initialized; nvidia-smi may tell more" in said
    assert "index-url" not in said


def test_a_device_alone_tells_of_a_gpu(fake):
    fake.node()
    said = nvidia.unusable()
    assert "(an NVIDIA GPU, a driver of unknown version)" in said and nvidia.URL in said


@pytest.mark.parametrize("why", ["none", "no driver", "hidden", "usable"])
def test_nothing_is_said_where_there_is_nothing_to_mend(why, fake, monkeypatch):
    if why == "no driver":
        fake.smi("NVIDIA-SMI has failed, no devices were found", 9)
    elif why != "none":
        fake.smi("NVIDIA H100, 550.54.15")
    if why == "hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if why == "usable":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert nvidia.unusable() == ""


@pytest.mark.parametrize("command", ["sweep", "decode", "mha", "overhead", "memory", "gpu"])
def test_it_stops_the_benchmark_and_not_one_of_the_cpu(command, fake, monkeypatch, capsys):
    """Of the commands that take a device; one that is named is taken."""
    fake.smi("NVIDIA H100, 550.54.15")
    assert main([command]) == 2
    said = capsys.readouterr().err
    assert "it is built for CPUs alone" in said and f"{nvidia.URL}cu126" in said
    assert ("--rehearse" if command == "gpu" else "--device cpu measures the CPU") in said
    if command != "gpu":
        options = commands.Options(device="cpu")
        assert commands._device(options) == "cpu"
