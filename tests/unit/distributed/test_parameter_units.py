"""Units of parameters that are gathered together."""

from types import SimpleNamespace

from torch import nn

from megatron.core.distributed.model_parameters import units_of
from megatron.core.distributed.zero.parameter_units import ParameterUnits


class Buffer:
    """Notes what is gathered of it. Objects of other processes have other addresses and hashes."""

    def __init__(self, name, address, seen):
        self.name, self.address, self.seen = name, address, seen
        self.params = self
        self.units = [SimpleNamespace(allocate=lambda: None)]
        self.flat = SimpleNamespace(mesh=SimpleNamespace(agreed=lambda problem: problem))

    def __hash__(self):
        return self.address

    def prefetch(self, number):
        return True

    def start_gather(self, number, user):
        self.seen.append((self.name, number))

    def gather(self, number, user):
        pass

    def prepare_update(self):
        pass


def test_buckets_of_a_unit_are_gathered_in_one_order_wherever_their_buffers_lie():
    orders = set()
    for address in range(16):
        model, seen = nn.Sequential(nn.Linear(2, 2)), []
        dense, experts = Buffer("dense", address, seen), Buffer("experts", 15 - address, seen)
        places = {model[0].weight: (dense, 0), model[0].bias: (experts, 0)}
        with ParameterUnits(units_of(model), places).summon():
            orders.add(tuple(seen))
    assert orders == {(("dense", 0), ("experts", 0))}
