"""One compile cache for the whole test run, and no state carried from one test to the next."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo
from torch.utils.data import BatchSampler, DataLoader

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).resolve().parent.parent / "build" / "inductor"))


# With two threads tiny operations stall for milliseconds on a busy machine. Here for what is made at import, too.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_start():
    """The same seeds and one thread, and nothing that torch.compile has learned.

    What one test taught it of the shapes in a function (``torch._dynamo.pgo``, by file and line) would make the next
    one's graphs of that function dynamic from the first on, in some orders of the tests only (torch 2.13).
    """
    torch._dynamo.reset()
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def search_on_disk(tmp_path_factory):
    """One real run of mode="auto" for all that show such a run."""
    from auto_runs import logged_search  # not before the compile cache has its place

    return logged_search(tmp_path_factory.mktemp("search"))


@pytest.fixture(autouse=True)
def _own_directory(tmp_path, monkeypatch):
    """Whatever a run writes without being told where goes into the test's own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPILE_PROFILER_CACHE_DIR", str(tmp_path / "verdicts"))


@pytest.fixture(autouse=True)
def _loaders_as_torch_wrote_them():
    """Lightning patches these while it asks the user's hook for a loader; where the hook raises, it leaves them so."""
    patched = [
        (kind, name) for kind in (DataLoader, BatchSampler) for name in ("__init__", "__setattr__", "__delattr__")
    ]
    before = [vars(kind).get(name) for kind, name in patched]
    yield
    for (kind, name), value in zip(patched, before, strict=True):
        if value is not None:
            setattr(kind, name, value)
        elif name in vars(kind):
            delattr(kind, name)
