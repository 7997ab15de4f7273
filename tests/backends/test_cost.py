"""What a unit costs: the sums, done by hand here."""

from __future__ import annotations

from fsshard.backends.cost import Numbers, Payload, divided, owned, replicated


def payload(kind: str, nbytes: int, ranks: int, least: int | None = None) -> Payload:
    return Payload(kind=kind, nbytes=nbytes, least=nbytes if least is None else least, ranks=ranks)


def test_a_replica_is_held_whole_and_only_its_gradients_are_sent() -> None:
    cost = replicated(held=400, reduced=200, ranks=4)
    assert (cost.held, cost.gathered, cost.gathers) == (400, 0, 0)
    assert cost.payloads == (payload("all_reduce", 200, 4),)


def test_owners_receive_gradients_and_send_what_is_trained() -> None:
    cost = owned(held=400, reduced=200, updated=300, ranks=4)
    assert cost.held == 400 and cost.payloads == (payload("all_to_all", 200, 4), payload("broadcast", 300, 4))


def test_parts_are_held_padded_and_gathered_in_the_dtype_of_the_computation() -> None:
    """Ten numbers on four ranks are three each, twelve with padding; computed with and reduced in bfloat16."""
    everything = Numbers(padded=3, real=10)
    cost = divided(everything, everything, itemsizes=(4, 2, 2), gathers=(4, 4), ranks=4, replicas=1)
    assert (cost.held, cost.gathered, cost.gathers) == (12, 24, 2)
    assert cost.payloads == (*[payload("all_gather", 24, 4, 20)] * 2, payload("reduce_scatter", 24, 4, 20))


def test_copies_of_what_is_divided_average_their_parts() -> None:
    cost = divided(Numbers(padded=3, real=10), Numbers(padded=2, real=7), (4, 4, 4), (4,), ranks=4, replicas=2)
    assert cost.payloads[1:] == (payload("reduce_scatter", 32, 4, 28), payload("all_reduce", 8, 2))
