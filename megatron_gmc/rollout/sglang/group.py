"""A process group of this process and the ranks of one engine, for sending weights.

Rank 0 sends; the engine's ranks join it from 1 on, with `/init_weights_update_group`. The group
stands beside torch.distributed's world: it needs no default group and leaves no trace there.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gmc.rollout.engine import EngineError


class SendingGroup:
    """`name` must be new for each group; `address` is this host's, as the engine reaches it.

    Its rendezvous listens on `address` alone. Calls block, at most `timeout_s` seconds.
    """

    def __init__(self, name: str, ranks: int, address: str, timeout_s: float) -> None:
        self.name = name
        self.ranks = ranks
        self.address = address
        self.backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._timeout = timedelta(seconds=timeout_s)
        listener = socket.create_server((address, 0))
        self.port = int(listener.getsockname()[1])
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            self.port,
            ranks,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL | None = None

    def join(self) -> None:
        """Wait for the engine's ranks; raises EngineError where they do not come."""
        # SGLang and torch put the name and the device in front of every key, in this order
        device = "cuda" if self.backend == "nccl" else "cpu"
        store: dist.Store = self._store  # type: ignore[name-defined]
        for prefix in (self.name, f"{self.name}/", f"{device}/"):
            store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        try:
            if self.backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                self._group = dist.ProcessGroupNCCL(store, 0, self.ranks, options)
            else:
                self._group = dist.ProcessGroupGloo(store, 0, self.ranks, self._timeout)
        except RuntimeError as error:
            raise EngineError(f"its ranks did not join the group for weights: {error}") from error

    def broadcast(self, flat: Tensor) -> None:
        """Send `flat`, uint8 [bytes] on the CPU; raises EngineError where a rank is gone."""
        assert self._group is not None, "join first"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        sent = flat.cuda() if self.backend == "nccl" else flat
        try:
            self._group.broadcast([sent], options).wait(self._timeout)  # type: ignore[union-attr]
        except RuntimeError as error:
            raise EngineError(f"the transfer of weights broke: {error}") from error
