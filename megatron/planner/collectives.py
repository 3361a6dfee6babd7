"""Seconds of collectives: latency plus bytes over the bandwidth of NVLink domains and NICs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.planner.hardware import Hardware, RowHardware
from megatron.planner.workload import FloatArray, Workloads


@dataclass(frozen=True)
class CollectiveCosts:
    """Costs of the groups of a table's layouts.

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
        nics = members * self.workloads.nic_bytes_per_s * self.hardware.constant("nic_efficiency")
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
        """Return the time of an all-reduce, which moves what both of the others do."""
        return 2 * self.all_gather(bytes_whole, size, stride)

    def all_to_all(
        self, bytes_sent: FloatArray, size: FloatArray, stride: FloatArray
    ) -> FloatArray:
        """Return the time in which each member sends `bytes_sent`, an equal share to each."""
        inside = self.rows.nvlink_bytes_per_s * self.hardware.constant("nvlink_efficiency")
        across = self.workloads.nic_bytes_per_s * self.hardware.constant("nic_efficiency")
        members = self.members_of_domain(size, stride)
        moved = bytes_sent * (size - members) / size / across
        moved = np.maximum(moved, bytes_sent * (members - 1) / size / inside)
        return np.where(size > 1, self.latency(size, stride) + moved, 0.0)

    def point_to_point(self, bytes_sent: FloatArray, stride: FloatArray) -> FloatArray:
        """Return the time of a message to the rank `stride` further."""
        is_inside = stride < self.workloads.nvlink_domain
        inside = self.rows.nvlink_bytes_per_s * self.hardware.constant("nvlink_efficiency")
        across = self.workloads.nic_bytes_per_s * self.hardware.constant("nic_efficiency")
        return self.hardware.constant("nic_latency_s") + bytes_sent / np.where(
            is_inside, inside, across
        )
