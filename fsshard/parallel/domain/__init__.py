"""How does one field lie on several ranks, and an operator compute on its parts what it computes on the whole?

:func:`~fsshard.parallel.domain.sharding.shard_domain` changes neuraloperator's FNO and TFNO in place, so that each rank
of a group holds a slab of every sample. :mod:`~fsshard.parallel.domain.slabs` says where slabs begin and
end, and where activations lie, :mod:`~fsshard.parallel.domain.exchange` moves them between ranks with exact adjoints,
and :mod:`~fsshard.parallel.domain.domain` is what users hold. The layers are in
:mod:`~fsshard.parallel.domain.spectral_convolution`, with the Fourier modes in :mod:`~fsshard.parallel.domain.modes`,
and :mod:`~fsshard.parallel.domain.layers`; which modules are taken is written down in
:mod:`~fsshard.parallel.domain.accepted`, and what may enter a forward or a loss in
:mod:`~fsshard.parallel.domain.entering`.

Gradients follow one rule: the objective is the mean over all ranks, data x domain, of what each of them backpropagates.
The adjoint of an exchange is the exchange back, and that of a sum or a gather adds up what the ranks know. Averaging
over all ranks, which every engine of :func:`fsshard.wrap` does, is then right for every parameter.
"""
