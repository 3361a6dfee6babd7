"""Seconds of collectives: latency plus bytes over the bandwidth of NVLink domains and NICs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_lattice.planner.hardware import Hardware, RowHardware
from megatron_lattice.planner.workload import FloatArray, Workloads


@dataclass(frozen=True)
class CollectiveCosts:
    """Costs of collectives in the process groups of each layout of a table.

    A group is its size and its stride, the distance of neighbouring members in global ranks: with
    the order tp-cp-ep-dp-pp the stride of an axis is the product of the sizes before it.
    """

    workloads: Workloads
    rows: RowHardware
    hardware: Hardware

    def members_of_domain(self, size: FloatArray, stride: FloatArray) -> FloatArray:
        """Return how many members of a group one NVLink domain holds."""
        return np.clip(np.floor(self.workloads.nvlink_domain / stride), 1.0, size)

    def bandwidth(self, size: FloatArray, stride: FloatArray) -> FloatArray:
        """Return the bytes per second that a member sends in a ring.

        Between domains a ring may use the NICs of all its members in a domain; inside, NVLink.
        """
        inside = self.rows.nvlink_bytes_per_s * self.hardware.constant("nvlink_efficiency")
        members = self.members_of_domain(size, stride)
        used = members ** self.hardware.constant("nic_exponent")
        nics = used * self.workloads.nic_bytes_per_s * self.hardware.constant("nic_efficiency")
        return np.where(members >= size, inside, np.minimum(inside, nics))

    def latency(self, size: FloatArray, stride: FloatArray) -> FloatArray:
        """Return the time of a collective without bytes."""
        members = self.members_of_domain(size, stride)
        domains = np.ceil(size / members)
        across = self.hardware.constant("nic_latency_s") * np.log2(np.maximum(domains, 1.0))
        within = np.where(members > 1, self.hardware.constant("nvlink_latency_s"), 0.0)
        return within + across

    def all_gather(
        self, bytes_whole: FloatArray, size: FloatArray, stride: FloatArray
    ) -> FloatArray:
        """Return the time of an all-gather or a reduce-scatter of `bytes_whole` in all."""
        moved = (size - 1) / size * bytes_whole
        needed = self.latency(size, stride) + moved / self.bandwidth(size, stride)
        return np.where(size > 1, needed, 0.0)

    def all_reduce(
        self, bytes_whole: FloatArray, size: FloatArray, stride: FloatArray
    ) -> FloatArray:
        """Return the time of an all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather(bytes_whole, size, stride)

    def expert_exchange(self, bytes_of_copy: FloatArray, num_copies: FloatArray) -> FloatArray:
        """Return the time of sending each token to `num_copies` experts of the expert group.

        A token is sent to another NVLink domain once, even if several of its experts are there;
        inside a domain it is sent once for each expert.
        """
        loads = self.workloads
        size, stride = loads.expert_size, loads.expert_tensor_size
        constant = self.hardware.constant
        inside = self.rows.nvlink_bytes_per_s * constant("exchange_nvlink_efficiency")
        across = loads.nic_bytes_per_s * constant("exchange_nic_efficiency")
        members = self.members_of_domain(size, stride)
        domains = np.ceil(size / members)
        others = (domains - 1) * (1 - (1 - 1 / domains) ** num_copies)
        local = num_copies * (members - 1) / members
        moved = np.maximum(bytes_of_copy * others / across, bytes_of_copy * local / inside)
        return np.where(size > 1, self.latency(size, stride) + moved, 0.0)

    def point_to_point(self, bytes_sent: FloatArray, stride: FloatArray) -> FloatArray:
        """Return the time of a message to the rank `stride` further."""
        is_inside = stride < self.workloads.nvlink_domain
        inside = self.rows.nvlink_bytes_per_s * self.hardware.constant("nvlink_efficiency")
        across = self.workloads.nic_bytes_per_s * self.hardware.constant("nic_efficiency")
        return self.hardware.constant("nic_latency_s") + bytes_sent / np.where(
            is_inside, inside, across
        )
