"""One thread for tiny tensors: more only wait for each other. Some code sets the number; it is put back."""

from collections.abc import Iterator

import pytest
import torch

from ringspun.train import launch


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(launch, "cores", lambda: 1)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
