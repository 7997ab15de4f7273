"""What changes where a mesh has more than one dimension?

:mod:`~fsshard.parallel.meshes` and :mod:`~fsshard.parallel.data_rank` tell the dimensions of data, whose ranks see
different samples, from the others. Along these, tensor, context and domain parallelism have divided the model before
it is wrapped: :mod:`~fsshard.parallel.model_mesh` finds them and what each parameter is along each;
:mod:`~fsshard.parallel.shared_gradients` adds up what their ranks know of the gradient of a parameter that they share;
:mod:`~fsshard.parallel.replicas` finds out whether what should be the same on several ranks is.
"""
